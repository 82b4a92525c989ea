"""Searches whose trials each run on several devices at once: as exact as any, and as hard to break."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hydra_tune as ht
from tests.fault.searches import run, undisturbed, values
from tests.strategies.searches import (
    SPEC,
    candidate,
    equals_the_plain_loop,
    events,
    run_and_lose,
    search_of,
    stop_and_resume,
)

SEARCH = search_of("--strategy", "pipeline", "--checkpoint-seconds", "0.3")
YAML = f"""
space: {SPEC}:build
study: y
trials: 1
devices: 2xcpu
seed: 11
strategy: {{name: pipeline, placer: m-topo, microbatches: 2, order: gpipe}}
"""


def deep(**fields: Any) -> ht.Candidate:
    layers: list[nn.Module] = [nn.Linear(32, 96)]
    for _ in range(5):
        layers += [nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 96)]
    return candidate(*layers, nn.Linear(96, 2), **fields)


def test_two_pipelined_trials_at_once_equal_the_plain_loop() -> None:
    def build(trial: Any) -> ht.Candidate:
        trial.suggest_float("x", 0, 1)
        return deep(clip_grad_norm=0.5, accumulate=2)

    strategy = {"name": "pipeline", "placer": "m-sct", "microbatches": 8}
    result = ht.search(build, trials=2, devices="2xcpu", strategy=strategy, seed=11, progress=False, study="p")
    equals_the_plain_loop(result, lambda _: deep(clip_grad_norm=0.5, accumulate=2))
    shown = json.loads(run("show", "p", "0", "--json", folder=Path.cwd()).stdout)
    assert shown["strategy"] == "pipeline"
    assert shown["plan"]["microbatches"] == 8
    assert shown["plan"]["measured_step_ms"] > 0
    assert shown["plan"]["predicted_step_ms"] > 0
    assert all(stage["measured_ms"] > 0 and stage["predicted_ms"] > 0 for stage in shown["plan"]["stages"])
    # A chain is one stage to this placer, whose forward has the backward in it.
    assert "forward" in {unit["kind"] for unit in shown["units"]}


def test_two_trials_at_once_go_opposite_ways_through_the_devices() -> None:
    def build(trial: Any) -> ht.Candidate:
        trial.suggest_float("x", 0, 1)
        return deep(epochs=12)

    strategy = {"name": "pipeline", "placer": "balanced", "microbatches": 2}
    result = ht.search(build, trials=2, devices="2xcpu", strategy=strategy, seed=11, progress=False, concurrency=2)
    ways = {tuple(stage["device"] for stage in trial.plan["stages"]) for trial in result.trials}
    assert ways == {("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")}


def test_show_draws_the_stages_and_the_search_says_what_is_not_exact(tmp_path: Path) -> None:
    (tmp_path / "y.yaml").write_text(YAML)
    done = run("search", "y.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = run("show", "y", "0", folder=tmp_path).stdout
    assert "placed by m-topo, 2 micro-batches, gpipe: a step takes" in shown
    lines = shown.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["stage", "device"])
    assert lines[head].split() == ["stage", "device", "nodes", "bytes", "predicted", "ms", "measured", "ms"]
    assert [line.split()[:2] for line in lines[head + 1 : head + 3]] == [["0", "cpu:0"], ["1", "cpu:1"]]
    warning = "the result is not that of whole batches: the model draws random numbers, such as for dropout"
    assert ("pipeline", warning) in events(tmp_path)


def test_options_can_be_given_by_a_flag(tmp_path: Path) -> None:
    done = run(*SEARCH, "--trials", "1", "--strategy", "{name: pipeline, microbatches: 2}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(run("show", "s", "0", "--json", folder=tmp_path).stdout)
    assert shown["plan"]["microbatches"] == 2
    for flag, said in (
        ("{name: pipeline, placer: m-sctt}", "error: placer cannot be 'm-sctt' (did you mean 'm-sct'?"),
        ("{name: pipeline", "error: --strategy '{name: pipeline' cannot be read (write it as in YAML:"),
        ("{name: 2026-13-45}", "error: --strategy '{name: 2026-13-45}' cannot be read (write it as in YAML:"),
        ("[[pipeline]]", "error: strategy cannot be ['pipeline'] (did you mean 'pipeline'? known: "),
        ("{name: pipeline, 1: 2}", "error: strategy 'pipeline' has no option 1 (known: "),
    ):
        done = run(*SEARCH, "--strategy", flag, "--study", "t", folder=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(said)
        assert done.stderr.count("\n") == 1


def test_a_pruned_trial_shows_what_was_measured_of_it() -> None:
    never = optuna.pruners.ThresholdPruner(upper=-1.0)
    with pytest.raises(ht.SearchFailed):
        ht.search(
            lambda trial: deep(), trials=1, devices="2xcpu", strategy="pipeline", pruner=never, progress=False,
            study="pruned",
        )  # fmt: skip
    (record,) = ht.SearchResult("sqlite:///hydra_tune.db", "pruned").trials
    assert record.state == "PRUNED"
    assert record.plan["measured_step_ms"] > 0
    assert all(stage["measured_ms"] > 0 for stage in record.plan["stages"])


class Branches(nn.Module):
    """Two branches of a few milliseconds each, which nothing joins before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(*(nn.Linear(768, 768) for _ in range(3))) for _ in range(2))
        self.head = nn.Linear(2 * 768, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.left(x), self.right(x)], 1))


def test_branches_run_at_the_same_time_within_one_micro_batch() -> None:
    def build(trial: Any) -> ht.Candidate:
        data = TensorDataset(torch.randn(2048, 768), torch.randint(2, (2048,)))
        return deep(model=Branches(), train=data, valid=None, batch_size=512, epochs=1)

    strategy = {"name": "pipeline", "placer": "m-etf", "microbatches": 1}
    ht.search(build, trials=1, devices="2xcpu", strategy=strategy, seed=1, progress=False, study="b")
    units = json.loads(run("show", "b", "0", "--json", folder=Path.cwd()).stdout)["units"]
    for kind in ("forward", "backward"):
        spans = [(unit["device"], unit["started"], unit["started"] + unit["seconds"]) for unit in units
                 if unit["kind"] == kind]  # fmt: skip
        left, right = ([span[1:] for span in spans if span[0] == device] for device in ("cpu:0", "cpu:1"))
        together = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in left for b in right)
        assert together > 0, f"no {kind} of one branch was beside one of the other"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return undisturbed(*SEARCH, folder=tmp_path_factory.mktemp("unbroken"))


def test_a_killed_device_costs_the_work_since_the_checkpoint(tmp_path: Path, unbroken: list[Any]) -> None:
    run_and_lose(*SEARCH, folder=tmp_path, at_checkpoint=True)
    assert values(tmp_path, "s") == unbroken


def test_a_killed_search_is_resumed_to_the_same_result(tmp_path: Path, unbroken: list[Any]) -> None:
    stop_and_resume(*SEARCH, folder=tmp_path)
    assert values(tmp_path, "s") == unbroken


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"placer": "m-sctt"}, r"placer cannot be 'm-sctt' \(did you mean 'm-sct'"),
    ({"microbatches": 0}, r"microbatches cannot be 0 \(give a whole number from 1 on\)"),
    ({"order": "2f2b"}, r"order cannot be '2f2b'"),
    ({"stages": 2}, r"strategy 'pipeline' has no option 'stages'"),
]


@pytest.mark.parametrize(("options", "said"), WRONG, ids=[next(iter(options)) for options, _ in WRONG])
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ht.HydraTuneError, match=said):
        ht.search(lambda trial: deep(), trials=1, strategy={"name": "pipeline", **options}, progress=False)


UNFIT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows": ({}, {"microbatches": 11}, "microbatches is 11, but a batch has 10 rows (give 10 or less)"),
    "sum": (
        {"loss": partial(F.cross_entropy, reduction="sum")}, {"microbatches": 2},
        "microbatches is 2, but 2 micro-batches, weighted by rows, have ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(UNFIT))
def test_microbatches_that_cannot_be_are_refused(case: str) -> None:
    fields, options, said = UNFIT[case]

    def build(trial: Any) -> ht.Candidate:
        return deep(**fields)

    with pytest.raises(ht.SearchFailed):
        ht.search(
            build, trials=1, devices="2xcpu", strategy={"name": "pipeline", **options}, progress=False, study=case
        )
    (record,) = ht.SearchResult("sqlite:///hydra_tune.db", case).trials
    assert record.state == "FAILED"
    assert said in (record.error or "")


def infinite(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return an infinite loss in evaluation only."""
    return F.cross_entropy(outputs, targets) if torch.is_grad_enabled() else outputs.sum() * float("inf")


def test_a_validation_loss_that_is_no_number_ends_its_trial_only() -> None:
    def build(trial: Any) -> ht.Candidate:
        trial.suggest_float("x", 0, 1)
        return deep(loss=infinite if trial.number == 0 else F.cross_entropy)

    result = ht.search(build, trials=2, devices="2xcpu", strategy="pipeline", seed=1, progress=False, study="inf")
    assert [record.state for record in result.trials] == ["DIVERGED", "COMPLETE"]


def test_devices_without_the_room_are_said_with_the_bytes_that_lack() -> None:
    with pytest.raises(ht.SearchFailed):
        ht.search(
            lambda trial: deep(), trials=1, devices="2xcpu", device_memory="64KiB", strategy="pipeline", progress=False,
            study="room",
        )  # fmt: skip
    (record,) = ht.SearchResult("sqlite:///hydra_tune.db", "room").trials
    assert record.state == "OUT_OF_MEMORY"
    assert "--strategy shard" in (record.error or "")
    found = re.search(r"lacks? ([\d.]+) KiB", record.error or "")
    assert found, record.error
    assert float(found[1]) > 0
