"""Searches whose trials are clients around a centre: all modes, clients of several workers, and clients that die."""

from __future__ import annotations

import json
import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_tune as ht
from tests.candidates import accuracy, small_candidate
from tests.fault.searches import run
from tests.strategies.searches import (
    ONE_THREAD,
    SPEC,
    attempts,
    equals_the_plain_loop,
    events,
    run_and_lose,
    search_here,
    search_of,
    stop_and_resume,
)
from tests.strategies.subnets.test_search import wide

search = partial(search_here, "elastic", devices=ONE_THREAD)
SEARCH = search_of("--strategy", "elastic", "--checkpoint-seconds", "0.3")
YAML = f"""
space: {SPEC}:build
study: s
trials: 1
devices: %s
seed: 4
strategy: {{name: elastic, clients: %s, tau: 2, server_shards: 2}}
"""


def equals_a_plain_loop(result: ht.SearchResult, build: Any) -> None:
    with closing(result):
        equals_the_plain_loop(result, lambda _: build())


def test_all_reduce_over_two_devices_equals_twice_the_batch() -> None:
    """Clipping and momentum too; 21 batches are ten pairs and one that has no other."""
    fields: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01), "clip_grad_norm": 0.5, "epochs": 2,
    }  # fmt: skip
    result = search(lambda trial: wide(**fields), "a", devices="2xcpu", strategy={"mode": "allreduce"})
    equals_a_plain_loop(result, lambda: wide(batch_size=10, **fields))


@pytest.mark.parametrize("every", ["epoch", "step"])
@pytest.mark.parametrize("mode", ["allreduce", "async"])
def test_schedules_are_those_of_a_plain_loop(mode: str, every: str) -> None:
    fields: dict[str, Any] = {
        "scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7 if every == "epoch" else 0.95),
        "schedule_every": every, "epochs": 3,
    }  # fmt: skip
    result = search(lambda trial: wide(**fields), "e", strategy={"mode": mode, "clients": 1, "tau": 4})
    equals_a_plain_loop(result, lambda: wide(**fields))


def test_a_synchronous_server_at_every_step_equals_all_reduce() -> None:
    """The two ends of one scale: for plain SGD the mean of weights is the step of the mean gradient."""
    result = search(lambda trial: wide(), "s", devices="2xcpu", strategy={"mode": "sync", "clients": 2, "tau": 1})
    equals_a_plain_loop(result, lambda: wide(batch_size=10))


def test_one_asynchronous_client_equals_a_plain_loop() -> None:
    """What it adds to the centre is what it has learned, and it takes the same again."""
    result = search(lambda trial: wide(), "o", strategy={"mode": "async", "clients": 1, "tau": 3})
    equals_a_plain_loop(result, wide)


@pytest.mark.parametrize("chosen", [
    {"mode": "elastic", "clients": 3, "tau": 2}, {"mode": "async", "tau": 2}, {"workers_per_client": 2, "tau": 2},
], ids=["elastic", "async", "gang"])  # fmt: skip
def test_the_centre_is_judged_and_exported(chosen: dict[str, Any]) -> None:
    def build(trial: Any) -> ht.Candidate:
        return small_candidate(lr=0.02, epochs=3, keep="best")

    result = search(build, "c", devices="2xcpu", metric="accuracy", direction="maximize", strategy=chosen)
    with closing(result):
        inputs, targets = build(None).valid.tensors
        with torch.no_grad():
            found = accuracy(result.best_model().eval()(inputs), targets)
        assert found == pytest.approx(result.best_value, abs=1e-12)
        (record,) = result.trials
    assert record.plan is not None
    size = sum(t.nbytes for t in small_candidate().model.state_dict().values())
    for epoch in record.plan["epochs"]:
        assert epoch["server"] == 2 * size * epoch["exchanges"]
    assert sum(epoch["bytes"] for epoch in record.plan["epochs"]) == record.communicated_bytes


def slow(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if outputs.requires_grad:
        Path(f"trains-{os.getpid()}").touch()
        torch.mm(torch.ones(600, 600), torch.ones(600, 600))
    return F.cross_entropy(outputs, targets)


def test_clients_come_when_devices_are_idle_and_go_when_other_trials_want_them() -> None:
    """The first trial starts alone on all devices; the second one gets its share."""

    def build(trial: Any) -> ht.Candidate:
        trial.suggest_float("x", 0, 1)
        return wide(loss=slow, epochs=12 if trial.number == 0 else 4)

    result = search(build, "m", devices="2xcpu", trials=3, concurrency=2, strategy={"tau": 1})
    with closing(result):
        assert [record.state for record in result.trials] == ["COMPLETE"] * 3
        seen = {count for r in result.trials for e in (r.plan or {})["epochs"] for count in (e["least"], e["most"])}
    assert seen == {1, 2}


@pytest.mark.parametrize(("devices", "clients"), [("1xcpu", 3), ("4xcpu", "auto")])
def test_from_yaml_and_shown(tmp_path: Path, devices: str, clients: Any) -> None:
    (tmp_path / "y.yaml").write_text(YAML % (devices, clients))
    done = run("search", "y.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = run("show", "s", "0", folder=tmp_path).stdout
    assert f"mode elastic, {clients} clients; an exchange every 2 steps" in shown
    lines = shown.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["epoch", "exchanges"])
    assert lines[head].split() == ["epoch", "exchanges", "clients", "lost", "bytes"]
    assert [line.split()[0] for line in lines[head + 1 : head + 4]] == ["1", "2", "3"]
    assert run("export", "s", "--to", "out", folder=tmp_path).returncode == 0


def test_a_killed_client_costs_its_unfinished_batches(tmp_path: Path) -> None:
    run_and_lose(*SEARCH, folder=tmp_path, every=True)
    assert attempts(tmp_path) == 2, "no trial was tried again"
    lost = [message for kind, message in events(tmp_path) if kind == "lost"]
    assert lost
    assert lost[0].endswith("another one starts from the centre")


def test_a_gang_that_loses_a_worker_goes_on_to_the_same_result(tmp_path: Path) -> None:
    spec = (YAML % ("2xcpu", "auto")).replace("name: elastic,", "name: elastic, mode: allreduce,")
    (tmp_path / "y.yaml").write_text(spec)
    unbroken = tmp_path / "unbroken"
    unbroken.mkdir()
    (unbroken / "y.yaml").write_text(spec)
    assert run("search", "y.yaml", folder=unbroken).returncode == 0
    run_and_lose("search", "y.yaml", folder=tmp_path)
    assert attempts(tmp_path) == 1
    found, expected = (json.loads(run("show", "s", "0", "--json", folder=f).stdout) for f in (tmp_path, unbroken))
    assert found["values"] == expected["values"]


def test_a_killed_search_is_resumed(tmp_path: Path) -> None:
    resumed = json.loads(stop_and_resume(*SEARCH, folder=tmp_path))
    assert [trial["state"] for trial in resumed["trials"]] == ["COMPLETE"] * 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mode": "asynch"}, r"mode cannot be 'asynch' \(did you mean 'async'"),
    ({"clients": "many"}, r"clients cannot be 'many' \(give a whole number from 1 on, or auto\)"),
    ({"clients": 0}, r"clients cannot be 0"),
    ({"tau": 0}, r"tau cannot be 0 \(give a whole number from 1 on\)"),
    ({"beta": 1.5}, r"beta cannot be 1.5 \(give a number between 0 and 1\)"),
    ({"mode": "sync", "workers_per_client": 2}, r"mode sync has clients of one worker"),
    ({"client": 2}, r"strategy 'elastic' has no option 'client'"),
]


@pytest.mark.parametrize(("options", "said"), WRONG, ids=[str(sorted(options.items())) for options, _ in WRONG])
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ht.HydraTuneError, match=said):
        search(lambda trial: wide(), "w", strategy=options)


def test_a_client_with_more_workers_than_devices_is_refused() -> None:
    said = r"a client of 3 workers cannot run on 2 devices \(give 2 workers or fewer\)"
    with pytest.raises(ht.SpecError, match=said):
        search(lambda trial: wide(), "d", devices="2xcpu", strategy={"workers_per_client": 3})


def test_models_may_have_parts_that_no_batch_reaches() -> None:
    """A parameter without a gradient stays as it is in a gang, weight decay or not."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    def build(trial: Any = None, size: int = 5) -> ht.Candidate:
        return wide(
            model=Unused().double(), batch_size=size,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
        )  # fmt: skip

    equals_a_plain_loop(
        search(build, "u", devices="2xcpu", strategy={"mode": "allreduce"}), lambda: build(None, size=10)
    )
