"""Searches whose trials are trained as independent subnets: on any devices, and as hard to break as any."""

from __future__ import annotations

import json
import os
import signal
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
from hydra_tune.core.devices import cores
from tests.candidates import accuracy, rows, small_candidate
from tests.fault.searches import run, started, undisturbed, values, wait_for
from tests.strategies.searches import (
    ONE_THREAD,
    SPEC,
    attempts,
    events,
    pids,
    run_and_lose,
    search_here,
    search_of,
    stop_and_resume,
    training,
)

search = partial(search_here, "ist", devices="2xcpu")
SEARCH = search_of("--strategy", "ist", "--checkpoint-seconds", "0.3")
YAML = f"""
space: {SPEC}:build
study: s
trials: 1
devices: %s
seed: 4
sampler: random
strategy: {{name: ist, subnets: 3, local_steps: 1}}
"""


def wide(**fields: Any) -> ht.Candidate:
    given: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 3)).double(),
        "loss": F.cross_entropy, "optimizer": partial(torch.optim.SGD, lr=0.05), "train": rows(), "valid": rows(40),
        "batch_size": 5, "epochs": 2, "metrics": {"accuracy": accuracy},
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def state_of(result: ht.SearchResult) -> dict[str, torch.Tensor]:
    found = result.best_model().state_dict()
    result.close()
    return found


@pytest.mark.parametrize("how", ["travel", "reset"])
def test_bytes_are_those_of_the_formula(how: str) -> None:
    """Each phase brings its subnet and takes it back, with momentum where that travels and is there."""

    def build(trial: Any) -> ht.Candidate:
        return wide(optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))

    options = {"subnets": 4, "local_steps": 2, "optimizer_state": how}
    with closing(search(build, how, strategy=options)) as result:
        (record,) = result.trials
    h1, h2 = 24 // 4, 20 // 4
    subnet = 6 * h1 + h1 + h1 * h2 + h2 + h2 * 3 + 3
    # 103 rows are 21 batches, of which subnet 0 gets 6 and the others 5: three rounds an epoch, in the last of which
    # subnet 0 takes two steps and the others one.
    phases = 2 * 3 * 4
    weights = 2 * 8 * subnet * phases
    momentum = 2 * 8 * subnet * phases - 8 * subnet * 4  # in the first round there is none to bring
    assert record.communicated_bytes == weights + (momentum if how == "travel" else 0)
    assert record.plan is not None
    assert record.plan["subnet_parameters"] == subnet
    assert [epoch["rounds"] for epoch in record.plan["epochs"]] == [3, 3]
    assert sum(epoch["bytes"] for epoch in record.plan["epochs"]) == record.communicated_bytes


def test_the_number_of_devices_changes_nothing() -> None:
    def build(trial: Any) -> ht.Candidate:
        return small_candidate(epochs=2, accumulate=2)  # dropout and batch-norm

    few = state_of(search(build, "few", devices=ONE_THREAD, strategy={"subnets": 3, "local_steps": 1}))
    many = state_of(search(build, "many", devices=f"{2 * cores()}xcpu", strategy={"subnets": 3, "local_steps": 1}))
    for name, tensor in few.items():
        torch.testing.assert_close(many[name], tensor, rtol=0, atol=1e-9)


def test_the_exported_model_is_the_one_that_was_judged() -> None:
    """With the scaling of use and statistics of the whole net: its accuracy is the one reported."""

    def build(trial: Any) -> ht.Candidate:
        return small_candidate(lr=0.02, epochs=4, keep="best")

    chosen = {"subnets": 2, "local_steps": 3}
    with closing(search(build, "b", metric="accuracy", direction="maximize", strategy=chosen)) as result:
        model = result.best_model().eval()
        inputs, targets = build(None).valid.tensors
        with torch.no_grad():
            assert accuracy(model(inputs), targets) == pytest.approx(result.best_value, abs=1e-12)
    norm = model[1]
    with torch.no_grad():
        seen = model[0](build(None).train.tensors[0])
    torch.testing.assert_close(norm.running_mean, seen.mean(0), rtol=0, atol=0.1)


def test_subnets_next_to_other_trials_on_one_device() -> None:
    def build(trial: Any) -> ht.Candidate:
        return wide(optimizer=partial(torch.optim.SGD, lr=trial.suggest_float("lr", 1e-3, 1e-1)))

    options: dict[str, Any] = {"trials": 3, "sampler": "random", "strategy": {"subnets": 2, "local_steps": 2}}
    with closing(search(build, "together", devices="1xcpu", concurrency=3, **options)) as together:
        found = [record.value for record in together.trials]
    with closing(search(build, "alone", devices="1xcpu", concurrency=1, **options)) as alone:
        assert found == [record.value for record in alone.trials]
    assert len(set(found)) == 3


@pytest.mark.parametrize("devices", ["1xcpu", "4xcpu"])
def test_from_yaml_and_shown(tmp_path: Path, devices: str) -> None:
    (tmp_path / "y.yaml").write_text(YAML % devices)
    done = run("search", "y.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = run("show", "s", "0", folder=tmp_path).stdout
    assert "strategy ist" in shown
    assert "3 subnets of 1 local steps; 1024 neurons are dealt out" in shown
    lines = shown.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:3] == ["epoch", "rounds", "subnets"])
    assert lines[head].split() == ["epoch", "rounds", "subnets", "lost", "bytes"]
    assert [line.split()[:4] for line in lines[head + 1 : head + 4]] == [[str(i), "3", "3", "0"] for i in (1, 2, 3)]
    exported = run("export", "s", "--to", "out", folder=tmp_path)
    assert exported.returncode == 0, exported.stderr


def test_pinned_partitions_are_read_by_their_own_worker_only() -> None:
    """Each on one device, whatever the number of subnets, and never in the builder; batch-norm's statistics too."""

    def partition(index: int) -> Any:
        def load() -> Any:
            Path(f"reads-{index}-{os.getpid()}").touch()
            inputs, targets = rows().tensors
            return TensorDataset(inputs[index::3], targets[index::3])

        return load

    def build(trial: Any) -> ht.Candidate:
        Path(f"builds-{os.getpid()}").touch()
        return small_candidate(train=ht.Pinned(*map(partition, range(3))), epochs=2)

    with closing(search(build, "p", strategy={"data": "pinned", "local_steps": 2})) as result:
        (record,) = result.trials
        assert result.best_model()[1].num_batches_tracked == 3 * 4, "statistics of all batches of all partitions"
    readers = [pids(Path.cwd(), f"reads-{index}") for index in range(3)]
    assert [len(found) for found in readers] == [1, 1, 1]
    assert readers[0] == readers[2] != readers[1], "partition k on device k modulo the number of devices"
    assert not set.union(*readers) & pids(Path.cwd(), "builds")
    assert record.plan is not None
    assert [epoch["rounds"] for epoch in record.plan["epochs"]] == [2, 2]


# Kills and interrupts


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return undisturbed(*SEARCH, folder=tmp_path_factory.mktemp("unbroken"))


def test_a_killed_device_costs_one_phase(tmp_path: Path, unbroken: list[Any]) -> None:
    run_and_lose(*SEARCH, folder=tmp_path, every=True)
    assert values(tmp_path, "s") == unbroken
    assert attempts(tmp_path) == 2, "no trial was tried again"
    lost = [message for kind, message in events(tmp_path) if kind == "lost"]
    assert lost
    assert lost[0].endswith("is run again")


def test_a_killed_builder_costs_nothing_once_the_trials_are_laid_out(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, folder=tmp_path) as going:
        wait_for(
            lambda: len(list(Path("/dev/shm").glob(f"hydra-tune-search-{going.pid}-*/trial-*/kit"))) == 2, "both trials"
        )
        wait_for(lambda: training(tmp_path), "training")
        (builder,) = pids(tmp_path, "builds")
        os.kill(builder, signal.SIGKILL)
        _, errors = going.communicate()
    assert going.returncode == 0, errors
    assert values(tmp_path, "s") == unbroken


def test_a_lost_phase_can_be_skipped(tmp_path: Path) -> None:
    spec = (YAML % "2xcpu").replace("local_steps: 1", "local_steps: 1, lost: skip")
    (tmp_path / "y.yaml").write_text(spec)
    run_and_lose("search", "y.yaml", folder=tmp_path)
    assert attempts(tmp_path) == 1
    lost = [message for kind, message in events(tmp_path) if kind == "lost"]
    assert any("is skipped for this round" in message or "is run again" in message for message in lost)
    assert json.loads(run("show", "s", "0", "--json", folder=tmp_path).stdout)["state"] == "COMPLETE"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_search_is_resumed_to_the_same_result(
    tmp_path: Path, unbroken: list[Any], how: signal.Signals
) -> None:
    stop_and_resume(*SEARCH, folder=tmp_path, how=how)
    assert values(tmp_path, "s") == unbroken


# What is refused

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"subnets": 0}, r"subnets cannot be 0 \(give a whole number from 1 on\)"),
    ({"local_steps": "x"}, r"local_steps cannot be 'x' \(give a whole number from 1 on\)"),
    ({"deal": "widht"}, r"deal cannot be 'widht' \(did you mean 'width'"),
    ({"optimizer_state": "keep"}, r"optimizer_state cannot be 'keep' \(known: reset, travel\)"),
    ({"data": "pined"}, r"data cannot be 'pined' \(did you mean 'pinned'"),
    ({"lost": "ignore"}, r"lost cannot be 'ignore' \(known: rerun, skip\)"),
    ({"subnet": 2}, r"strategy 'ist' has no option 'subnet' \(did you mean 'subnets'"),
]


@pytest.mark.parametrize(("options", "said"), WRONG, ids=[next(iter(options)) for options, _ in WRONG])
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ht.HydraTuneError, match=said):
        search(lambda trial: wide(), "w", strategy=options)


UNFIT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, str]] = {
    "nothing to deal": (
        {"model": nn.Sequential(nn.Linear(6, 3)).double()}, {}, {}, "FAILED",
        "nothing of the model can be dealt out to subnets: the outputs of '0' belong to all, as they are the model's",
    ),
    "few batches": ({"batch_size": 50}, {"subnets": 4}, {}, "FAILED", "an epoch has 3 batches, and each of 4 subnets"),
    "small device": (
        {}, {"subnets": 2}, {"device_memory": "2KiB"}, "OUT_OF_MEMORY", "a subnet needs",
    ),
    "unpinned": ({}, {"data": "pinned"}, {}, "FAILED", "data is 'pinned', and Candidate.train is no ht.Pinned"),
    "too few partitions": (
        {"train": ht.Pinned(rows, rows)}, {"data": "pinned", "subnets": 3}, {}, "FAILED",
        "there are 3 subnets, and Candidate.train has 2 pinned partitions",
    ),
    "pinned": (
        {"train": ht.Pinned(rows, rows)}, {"subnets": 2}, {}, "FAILED", "(use strategy ist with data: pinned)",
    ),
    "factored state": (
        {"optimizer": torch.optim.Adafactor}, {"subnets": 2}, {}, "FAILED", "(give optimizer_state: reset)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_candidates_that_do_not_fit_are_refused_with_the_reason(case: str) -> None:
    fields, chosen, options, state, said = UNFIT[case]
    with pytest.raises(ht.SearchFailed):
        search(lambda trial: wide(**fields), case, strategy=chosen, **options)
    (record,) = ht.SearchResult("sqlite:///hydra_tune.db", case).trials
    assert record.state == state
    assert said in (record.error or "")
