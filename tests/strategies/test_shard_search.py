"""Searches over models that are larger than their devices: as exact as any, and as hard to break."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hydra_tune as ht
from hydra_tune.devices import cores
from hydra_tune.storage import open_storage
from tests.candidates import plain_loop
from tests.fault.searches import run, started, values, wait_for
from tests.fault.test_full_disk import run_with_small_files

ONE_THREAD = f"{cores()}xcpu"
SPEC = Path(__file__).parent / "sharded_candidates.py"
SEARCH = [
    "search", f"{SPEC}:build", "--trials", "2", "--sampler", "random", "--seed", "4", "--devices", "2xcpu",
    "--device-memory", "3MiB", "--checkpoint-seconds", "0.5", "--study", "s",
]  # fmt: skip


def rows(count: int) -> TensorDataset:
    inputs = torch.randn(count, 32, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def wide(**fields: Any) -> ht.Candidate:
    """Four layers of which each takes a few hundred KiB in training."""
    layers: list[nn.Module] = [nn.Linear(32, 96)]
    for _ in range(4):
        layers += [nn.BatchNorm1d(96), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(96, 96)]
    given: dict[str, Any] = {
        "model": nn.Sequential(*layers, nn.Linear(96, 2)).double(), "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.AdamW, lr=0.01), "train": rows(43), "valid": rows(16), "batch_size": 10,
        "epochs": 2,
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def equals_the_plain_loop(result: ht.SearchResult, build: Any) -> None:
    seed = result.best_trial.seed
    torch.manual_seed(seed)
    expected, _losses = plain_loop(build(None), seed)
    found = result.best_model().state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def events(folder: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(folder / "hydra_tune.db")) as connection:
        return connection.execute("SELECT kind, message FROM hydra_events").fetchall()


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
    with closing(sqlite3.connect("hydra_tune.db")) as connection:
        lay = connection.execute("SELECT host_bytes + disk_bytes FROM hydra_spilled ORDER BY sampled").fetchall()
    assert max(lay)[0] == shown["spilled_bytes"]
    assert lay[-1] == (0,), "nothing is left at the end"


def test_a_node_that_cannot_fit_names_the_smallest_budget_and_trains_with_it() -> None:
    def build(trial: Any) -> ht.Candidate:
        layers = [nn.Linear(32, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 700), nn.Linear(700, 2)]
        return wide(model=nn.Sequential(*layers).double())

    options: dict[str, Any] = {"devices": ONE_THREAD, "seed": 11, "progress": False, "strategy": "shard"}
    with pytest.raises(ht.SearchFailed):
        ht.search(build, trials=1, device_memory="4MiB", study="small", **options)
    (record,) = ht.SearchResult("sqlite:///hydra_tune.db", "small").trials
    assert record.state == "OUT_OF_MEMORY"
    found = re.search(
        r"nodes? '[24]'(?: to '5')? needs? ([\d.]+) MiB on a device, and 3.6 MiB of 4.0 MiB are there for a shard "
        r"\(the smallest device_memory for this model is (\d+)MiB\)", record.error or ""
    )  # fmt: skip
    assert found, record.error
    needed, smallest = float(found[1]), int(found[2])
    assert 4 < needed <= 0.9 * smallest < needed + 1
    result = ht.search(build, trials=1, device_memory=f"{smallest}MiB", study="enough", **options)
    equals_the_plain_loop(result, build)
    assert (result.trials[0].shards or 0) > 1
    with pytest.raises(ht.SearchFailed):
        ht.search(build, trials=1, device_memory=f"{smallest - 1}MiB", study="less", **options)


class Sequences:
    """Rows whose length grows over the epoch: the first batch is short."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4 if index < 8 else 24, 24, generator=generator, dtype=torch.float64), torch.tensor(0.5)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(16)])
        self.out, self.dropout = nn.Linear(24, 1), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return self.out(x).mean((1, 2))


def test_a_later_batch_that_does_not_fit_is_trained_in_more_shards() -> None:
    def build(trial: Any) -> ht.Candidate:
        return ht.Candidate(
            model=Reader().double(), loss=F.mse_loss, optimizer=partial(torch.optim.Adam, lr=0.01), train=Sequences(),
            batch_size=4, epochs=2, shuffle=False,
        )  # fmt: skip

    result = ht.search(
        build, trials=1, devices=ONE_THREAD, device_memory="220KiB", strategy="shard", seed=1, study="grows",
        progress=False,
    )  # fmt: skip
    notes = [message for kind, message in events(Path.cwd()) if kind == "out of memory"]
    assert notes
    assert re.fullmatch(r"a step needs [\d.]+ [KM]iB of a device budget of 220.0 KiB; now in \d+ shards", notes[0])
    whole = ht.search(build, trials=1, devices=ONE_THREAD, strategy="whole", seed=1, study="whole", progress=False)
    for name, tensor in whole.best_model().state_dict().items():
        torch.testing.assert_close(result.best_model().state_dict()[name], tensor, rtol=0, atol=1e-9)


# Kills and interrupts


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the search gives when nothing happens to it."""
    folder = tmp_path_factory.mktemp("unbroken")
    done = run(*SEARCH, folder=folder)
    assert done.returncode == 0, done.stderr
    return values(folder, "s")


def pids(folder: Path, what: str) -> set[int]:
    return {int(path.name.rpartition("-")[2]) for path in folder.glob(f"{what}-*")}


def training(folder: Path) -> set[int]:
    """The workers that train by now, beside the builder."""
    return pids(folder, "trains") - pids(folder, "builds")


def committed(search: subprocess.Popen[str]) -> list[Path]:
    """The trials' files of a search of which some unit has ended."""
    found = Path("/dev/shm").glob(f"hydra-tune-run-{search.pid}-*/trial-*/index.json")
    return [path.parent for path in found if '"commits", 0' not in path.read_text()]


def nothing_is_left(search: subprocess.Popen[str]) -> None:
    assert not list(Path("/dev/shm").glob(f"hydra-tune-run-{search.pid}-*"))


def test_a_killed_device_costs_one_unit(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, folder=tmp_path) as search:
        wait_for(lambda: training(tmp_path) and committed(search), "a commit")
        for pid in training(tmp_path):
            os.kill(pid, signal.SIGKILL)
        _, errors = search.communicate(timeout=150)
    assert search.returncode == 0, errors
    assert values(tmp_path, "s") == unbroken
    lost = [message for kind, message in events(tmp_path) if kind == "lost"]
    assert lost
    assert "killed (signal 9)" in lost[0]
    assert lost[0].endswith("the trial goes on from its last commit")
    with closing(sqlite3.connect(tmp_path / "hydra_tune.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM hydra_attempts").fetchone() == (2,), "no trial was tried again"
    nothing_is_left(search)


def test_a_killed_builder_costs_the_work_since_the_checkpoint(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, folder=tmp_path) as search:
        wait_for(lambda: training(tmp_path) and committed(search), "a commit")
        (builder,) = pids(tmp_path, "builds")
        os.kill(builder, signal.SIGKILL)
        _, errors = search.communicate(timeout=150)
    assert search.returncode == 0, errors
    assert values(tmp_path, "s") == unbroken
    nothing_is_left(search)


def test_an_interrupted_search_is_resumed_to_the_same_result(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, "--checkpoint-seconds", "1000", folder=tmp_path) as search:
        wait_for(lambda: training(tmp_path) and committed(search), "a commit")
        search.send_signal(signal.SIGINT)
        _, errors = search.communicate(timeout=60)
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
    full = run_with_small_files(*flags, folder=tmp_path, limit=500_000)
    assert full.returncode == 1
    assert re.search(rf"there is no room for \d{{6,}} bytes in {folder}/hydra-tune-run-\S+ \(make room", full.stderr)
    assert full.stderr.count("\nerror:") == 1
    assert "Traceback" not in full.stderr
    assert not list(folder.iterdir())
    resumed = run("resume", "s", "--json", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [trial["state"] for trial in json.loads(resumed.stdout)["trials"]] == ["COMPLETE"]
