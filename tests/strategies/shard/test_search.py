"""Searches over models that are larger than their devices: as exact as any, and as hard to break."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_tune as ht
from hydra_tune.coordinator.attempt import Attempt
from hydra_tune.storage import open_storage
from hydra_tune.training.progress import Progress
from tests.fault.searches import run, started, undisturbed, values, wait_for
from tests.fault.test_full_disk import run_with_small_files
from tests.strategies.searches import (
    ONE_THREAD,
    attempts,
    candidate,
    equals_the_plain_loop,
    events,
    nothing_is_left,
    pids,
    search_of,
    training,
)

SEARCH = search_of("--device-memory", "3MiB", "--checkpoint-seconds", "0.5")


def wide(**fields: Any) -> ht.Candidate:
    """Four layers of which each takes a few hundred KiB in training."""
    layers: list[nn.Module] = [nn.Linear(32, 96)]
    for _ in range(4):
        layers += [nn.BatchNorm1d(96), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(96, 96)]
    return candidate(*layers, nn.Linear(96, 2), **fields)


def test_a_model_larger_than_its_device_equals_the_plain_loop() -> None:
    def build(trial: Any) -> ht.Candidate:
        return wide(clip_grad_norm=0.5, accumulate=2)

    options: dict[str, Any] = {"devices": ONE_THREAD, "seed": 11, "progress": False, "study": "w"}
    result = ht.search(build, trials=1, strategy="shard", device_memory="1MiB", **options)
    equals_the_plain_loop(result, build)
    shown = json.loads(run("show", "w", "0", "--json", folder=Path.cwd()).stdout)
    assert shown["strategy"] == "shard"
    assert shown["shards"] > 1
    assert shown["spill_written_bytes"] > 2**20
    assert shown["spill_read_bytes"] > 2**20
    assert 0 < shown["peak_device_bytes"] <= 2**20
    state = sum(tensor.nbytes for tensor in result.best_model().state_dict().values())
    assert shown["spilled_bytes"] > 3 * state, "weights and both moments lie there"
    steps = [unit for unit in shown["units"] if unit["shard"] is not None]
    kinds = ("forward", "backward", "step", "evaluate")
    wanted = {(kind, shard) for shard in range(shown["shards"]) for kind in kinds}
    assert {(unit["kind"], unit["shard"]) for unit in steps} >= wanted
    assert 0.9 * shown["spill_read_bytes"] < sum(u["read_bytes"] or 0 for u in steps) <= shown["spill_read_bytes"]
    with closing(sqlite3.connect("hydra_tune.db")) as connection:
        lay = connection.execute("SELECT host_bytes + disk_bytes FROM hydra_spilled ORDER BY sampled").fetchall()
    assert max(lay)[0] == shown["spilled_bytes"]
    assert lay[-1] == (0,), "nothing is left at the end"


class Branching(nn.Module):
    """Control flow on values in the model's own forward, which no recording could follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(32, 96), nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
        self.last = nn.Linear(96, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for layer in self.layers[:: 1 if x.sum() > 0 else 2]:
            h = torch.tanh(layer(h))
        return self.last(h)


def test_a_forward_that_branches_is_cut_and_steps_are_made_in_the_backward_where_nothing_defers_them() -> None:
    def build(trial: Any) -> ht.Candidate:
        return wide(model=Branching().double())

    result = ht.search(
        build, trials=1, strategy="shard", device_memory="1MiB", devices=ONE_THREAD, seed=3, progress=False, study="c"
    )
    equals_the_plain_loop(result, build)
    shown = json.loads(run("show", "c", "0", "--json", folder=Path.cwd()).stdout)
    assert shown["shards"] > 1
    units = shown["units"]
    kinds = {unit["kind"] for unit in units}
    assert "backward" in kinds
    assert "step" not in kinds


def test_a_later_search_with_the_same_models_measures_nothing_again(tmp_path: Path) -> None:
    def profiles() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("profiles/*.json")}

    assert run(*SEARCH, "--trials", "1", folder=tmp_path).returncode == 0
    before = profiles()
    assert before
    assert run(*SEARCH, "--trials", "1", "--study", "again", "--seed", "5", folder=tmp_path).returncode == 0
    assert profiles() == before


def test_a_trial_that_is_likely_pruned_counts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are pruned after their first epoch; of 20 epochs the later trials are expected to make few."""
    epochs, left = 20, dict[int, float]()
    plain = Attempt.remaining

    def remaining(attempt: Attempt, progress: Progress) -> float | None:
        found = plain(attempt, progress)
        if found is not None and progress.epoch == 0:
            per_epoch = progress.batches * progress.seconds / progress.batches_done
            left[attempt.number] = found / per_epoch
        return found

    monkeypatch.setattr(Attempt, "remaining", remaining)
    with pytest.raises(ht.SearchFailed):
        ht.search(
            lambda trial: wide(epochs=epochs), trials=12, strategy="shard", device_memory="1MiB", devices=ONE_THREAD,
            seed=3, progress=False, concurrency=1, pruner=optuna.pruners.ThresholdPruner(upper=-1.0),
        )  # fmt: skip
    assert left[0] > 5
    assert left[11] < 0.5 * left[0]


def test_a_node_that_cannot_fit_names_the_smallest_budget_and_trains_with_it() -> None:
    def build(trial: Any) -> ht.Candidate:
        layers = [nn.Linear(32, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 700), nn.Linear(700, 2)]
        return wide(model=nn.Sequential(*layers).double())

    options: dict[str, Any] = {"devices": ONE_THREAD, "seed": 11, "progress": False, "strategy": "shard"}
    with pytest.raises(ht.SearchFailed, match=r"OUT_OF_MEMORY \(nodes? .*the smallest device_memory") as failed:
        ht.search(build, trials=1, device_memory="4MiB", study="small", **options)
    (record,) = failed.value.result.trials
    failed.value.result.close()
    assert record.state == "OUT_OF_MEMORY"
    found = re.search(
        r"nodes? '[24]'(?: to '5')? needs? ([\d.]+) MiB on a device, where a shard may take 3.9 MiB of 4.0 MiB "
        r"\(the smallest device_memory for this model is (\d+)MiB\)", record.error or ""
    )  # fmt: skip
    assert found, record.error
    needed, smallest = float(found[1]), int(found[2])
    assert 4 < needed <= 0.97 * smallest < needed + 1
    result = ht.search(build, trials=1, device_memory=f"{smallest}MiB", study="enough", **options)
    equals_the_plain_loop(result, build)
    assert (result.trials[0].shards or 0) > 1
    with pytest.raises(ht.SearchFailed):
        ht.search(build, trials=1, device_memory=f"{smallest - 1}MiB", study="less", **options)


class Sequences:
    """Rows whose length grows over the epoch: the first batch is short."""

    def __init__(self, longest: int = 24) -> None:
        self.longest = longest

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = 4 if index < 8 else self.longest
        return torch.randn(length, 24, generator=generator, dtype=torch.float64), torch.tensor(0.5)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(16)])
        self.out, self.dropout = nn.Linear(24, 1), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return self.out(x).mean((1, 2))


def reading(**fields: Any) -> ht.Candidate:
    given: dict[str, Any] = {
        "model": Reader().double(), "loss": F.mse_loss, "optimizer": partial(torch.optim.Adam, lr=0.01),
        "train": Sequences(), "batch_size": 4, "epochs": 2, "shuffle": False,
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def test_a_later_batch_that_does_not_fit_is_trained_in_more_shards() -> None:
    def build(trial: Any) -> ht.Candidate:
        return reading()

    result = ht.search(
        build, trials=1, devices=ONE_THREAD, device_memory="150KiB", strategy="shard", seed=1, study="grows",
        progress=False,
    )  # fmt: skip
    notes = [message for kind, message in events(Path.cwd()) if kind == "out of memory"]
    assert notes
    assert re.fullmatch(r"a step needs [\d.]+ [KM]iB of a device budget of 150.0 KiB; now in \d+ shards", notes[0])
    whole = ht.search(build, trials=1, devices=ONE_THREAD, strategy="whole", seed=1, study="whole", progress=False)
    for name, tensor in whole.best_model().state_dict().items():
        torch.testing.assert_close(result.best_model().state_dict()[name], tensor, rtol=0, atol=1e-9)


@pytest.mark.parametrize("where", ["train", "valid"])
def test_a_later_batch_that_no_cut_fits_says_what_would_do_and_trains_with_it(where: str) -> None:
    def build(trial: Any) -> ht.Candidate:
        return reading(**{"train": Sequences(4), where: Sequences(900)}, epochs=1)

    options: dict[str, Any] = {"devices": ONE_THREAD, "strategy": "shard", "seed": 1, "progress": False}
    with pytest.raises(ht.SearchFailed):
        ht.search(build, trials=1, device_memory="1MiB", study="long", **options)
    (record,) = ht.SearchResult("sqlite:///hydra_tune.db", "long").trials
    assert record.state == "OUT_OF_MEMORY"
    found = re.search(
        r"a step needs [\d.]+ MiB of a device budget of 1.0 MiB, and in the smallest shards node '\S+' takes "
        r"([\d.]+) MiB for that batch \(give a device_memory of (\d+)MiB or more\)", record.error or ""
    )  # fmt: skip
    assert found, record.error
    needed, enough = float(found[1]), int(found[2])
    assert 1 < needed <= enough <= needed / 0.9 + 1
    result = ht.search(build, trials=1, device_memory=f"{enough}MiB", study="enough", **options)
    assert result.trials[0].state == "COMPLETE"


def test_a_device_that_runs_out_by_its_own_word_is_given_smaller_shards() -> None:
    """Raised by the loss, as a real one needs an accelerator."""
    folder = Path.cwd()

    def full_at_first(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not (folder / f"builds-{os.getpid()}").exists():
            (folder / f"step-{time.monotonic_ns()}").touch()
            if len(list(folder.glob("step-*"))) in (3, 4, 5):
                raise torch.OutOfMemoryError("there is nothing left")
        return F.cross_entropy(outputs, targets)

    def build(trial: Any) -> ht.Candidate:
        (folder / f"builds-{os.getpid()}").touch()
        return wide(loss=full_at_first)

    result = ht.search(
        build, trials=1, devices=ONE_THREAD, device_memory="2MiB", strategy="shard", seed=11, progress=False
    )
    notes = [message for kind, message in events(Path.cwd()) if kind == "out of memory"]
    shards = [int(re.fullmatch(r"there is nothing left; now in (\d+) shards", note)[1]) for note in notes]  # type: ignore[index]
    assert len(shards) == 3
    assert shards == sorted(shards)
    assert shards[0] < shards[-1], "each time for less of the budget"
    equals_the_plain_loop(result, lambda _: wide())


# Kills and interrupts


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return undisturbed(*SEARCH, folder=tmp_path_factory.mktemp("unbroken"))


def committed(search: subprocess.Popen[str]) -> list[Path]:
    """The trials' files of a search of which some unit has ended."""
    found = Path("/dev/shm").glob(f"hydra-tune-search-{search.pid}-*/trial-*/index.json")
    return [path.parent for path in found if '"commits", 0' not in path.read_text()]


def test_a_killed_device_costs_one_unit(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, folder=tmp_path) as search:
        wait_for(lambda: training(tmp_path) and committed(search), "a commit")
        for pid in training(tmp_path):
            os.kill(pid, signal.SIGKILL)
        _, errors = search.communicate()
    assert search.returncode == 0, errors
    assert values(tmp_path, "s") == unbroken
    lost = [message for kind, message in events(tmp_path) if kind == "lost"]
    assert lost
    assert "killed (signal 9)" in lost[0]
    assert lost[0].endswith("the trial goes on from its last commit")
    assert attempts(tmp_path) == 2, "no trial was tried again"
    nothing_is_left(search)


def test_a_killed_builder_costs_the_work_since_the_checkpoint(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, folder=tmp_path) as search:
        wait_for(lambda: training(tmp_path) and committed(search), "a commit")
        for builder in pids(tmp_path, "builds"):
            os.kill(builder, signal.SIGKILL)
        _, errors = search.communicate()
    assert search.returncode == 0, errors
    assert values(tmp_path, "s") == unbroken
    nothing_is_left(search)


def test_an_interrupted_search_is_resumed_to_the_same_result(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, "--checkpoint-seconds", "1000", folder=tmp_path) as search:
        wait_for(lambda: training(tmp_path) and committed(search), "a commit")
        search.send_signal(signal.SIGINT)
        _, errors = search.communicate()
    assert search.returncode == 130, errors
    assert list(tmp_path.glob("hydra_tune_files/*/*.checkpoints/*.json")), "the trials were checkpointed"
    nothing_is_left(search)
    resumed = run("resume", "s", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert values(tmp_path, "s") == unbroken


def test_a_full_spill_directory_is_said_plainly_and_the_study_can_be_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    flags = [*SEARCH, "--trials", "1", "--spill", str(folder)]
    with open_storage(f"sqlite:///{tmp_path}/hydra_tune.db"):
        pass  # the tables are there: making them takes a journal that is nearly as large as a block
    full = run_with_small_files(*flags, folder=tmp_path, limit=120_000)
    assert full.returncode == 1
    assert re.search(rf"there is no room for \d{{6,}} bytes in {folder}/hydra-tune-search-\S+ \(make room", full.stderr)
    assert full.stderr.count("\nerror:") == 1
    assert "Traceback" not in full.stderr
    assert not list(folder.iterdir())
    resumed = run("resume", "s", "--json", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [trial["state"] for trial in json.loads(resumed.stdout)["trials"]] == ["COMPLETE"]
