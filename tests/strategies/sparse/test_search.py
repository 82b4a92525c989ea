"""Searches over pruned networks: one replica or two, alone or beside others, and as hard to break as any."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import hydra_tune as ht
from tests.candidates import accuracy, rows
from tests.fault.searches import run, undisturbed, values
from tests.strategies.searches import SPEC, attempts, events, run_and_lose, search_of, stop_and_resume

SEARCH = search_of("--strategy", "sparse", "--checkpoint-seconds", "0.3")
YAML = f"""
space: {SPEC}:build
study: y
trials: 1
devices: 2xcpu
seed: 11
strategy: {{name: sparse, sparsity: 0.8, mask: magnitude, replicas: 2}}
"""


def wide(dtype: torch.dtype = torch.float64, **fields: Any) -> ht.Candidate:
    layers = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 3))
    given: dict[str, Any] = {
        "model": layers.to(dtype), "loss": F.cross_entropy, "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "train": rows(103, dtype=dtype), "valid": rows(40, dtype=dtype), "batch_size": 10, "epochs": 4,
        "metrics": {"accuracy": accuracy}, "clip_grad_norm": 0.5, "accumulate": 2,
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def searched(study: str, fields: dict[str, Any] | None = None, trials: int = 1, **options: Any) -> ht.SearchResult:
    def build(trial: Any) -> ht.Candidate:
        trial.suggest_float("x", 0, 1)
        return wide(**(fields or {}))

    return ht.search(
        build,
        trials=trials,
        devices="2xcpu",
        seed=3,
        progress=False,
        study=study,
        strategy={"name": "sparse", **options},
    )


@pytest.mark.parametrize("mask", ["early-bird", "random"])
def test_two_replicas_equal_one_with_the_same_batches(mask: str) -> None:
    options = {"mask": mask, "precision": "full", "sparsity": 0.8, "dense_epochs": 2}
    schedule = {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.7), "keep": "best"}
    one, two = (searched(f"r{n}", schedule, replicas=n, **options) for n in (1, 2))
    weights = one.best_model().state_dict()
    for name, tensor in two.best_model().state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert two.best_value == pytest.approx(one.best_value, abs=1e-9)
    kept = (weights["2.weight"] != 0).sum()
    assert int(kept) == round(0.2 * 64 * 64)
    assert [record.communicated_bytes > 0 for record in (*one.trials, *two.trials)] == [False, True]


def test_a_replica_without_rows_keeps_step_with_the_others() -> None:
    fields = {"train": rows(41, dtype=torch.float64), "accumulate": 1}
    one, two = (searched(f"l{n}", fields, replicas=n, mask="magnitude", precision="full") for n in (1, 2))
    assert two.best_value == pytest.approx(one.best_value, abs=1e-9)


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that divides by a sum over the batch, as one with ignored labels does."""
    return F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 3.0, 9.0], dtype=outputs.dtype))


def test_a_loss_that_is_no_mean_over_rows_has_one_replica() -> None:
    fields = {"loss": weighted, "accumulate": 1, "epochs": 1}
    options = {"mask": "magnitude", "precision": "full"}
    one, alone = searched("one", fields, replicas=1, **options), searched("alone", fields, **options)
    assert alone.best_value == one.best_value
    assert alone.trials[0].plan is not None
    assert alone.trials[0].plan["replicas"] == 1
    with pytest.raises(
        ht.SearchFailed, match=r"replicas is 2, but 2 micro-batches, weighted by rows, have .* as their loss"
    ):
        searched("two", fields, replicas=2, **options)


class Sometimes(nn.Module):
    """A model one part of which only some rows use: on two replicas, one may use it and the other not."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom, self.never = nn.Linear(6, 32), nn.Linear(6, 32), nn.Linear(6, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.always(x)
        chosen = x[:, 0] > 1.3
        if bool(chosen.any()):
            h = h.masked_scatter(chosen[:, None], h[chosen] + self.seldom(x[chosen]))
        return self.head(torch.tanh(h))


def test_a_part_that_only_one_replica_uses_makes_the_steps_it_makes_on_one() -> None:
    given = {"model": Sometimes().double(), "optimizer": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.5)}
    why = "its forward decides by contents"
    fields = {**given, "accumulate": 1, "epochs": 2, "whole_because": why}
    start = {name: tensor.clone() for name, tensor in fields["model"].state_dict().items()}
    one, two = (searched(f"some{n}", fields, replicas=n, mask="magnitude", precision="full") for n in (1, 2))
    weights = one.best_model().state_dict()
    for name, tensor in two.best_model().state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(weights["never.bias"], start["never.bias"])
    assert not torch.equal(weights["seldom.bias"], start["seldom.bias"])
    with pytest.raises(ht.SearchFailed, match=f"the candidate cannot be cut: {why}"):
        searched("cut", fields, stages=2, mask="magnitude")


def test_traffic_and_state_are_those_of_the_formula() -> None:
    result = searched("bytes", {"dtype": torch.float32, "epochs": 2}, mask="magnitude", sparsity=0.9)
    (record,) = result.trials
    plan = record.plan
    assert plan is not None
    weights, unpruned = 6 * 64 + 64 * 64 + 64 * 3, 64 + 64 + 64 + 64 + 3
    survivors = sum(round(0.1 * n) for n in (6 * 64, 64 * 64, 64 * 3))
    assert (plan["pruned_weights"], plan["survivors"]) == (weights, survivors)
    assert plan["state_bytes"] == 2 * weights + 24 * survivors + 16 * unpruned
    assert plan["dense_state_bytes"] == 20 * (weights + unpruned)
    assert plan["step_bytes"] == 2 * survivors + 4 * unpruned
    steps = 2 * 6  # 11 batches, a step after every second one and at the end
    assert record.communicated_bytes == 2 * steps * plan["step_bytes"]
    shown = run("show", "bytes", "0", folder=Path.cwd()).stdout
    assert f"2 replicas, {survivors} of {weights} weights survive (mask: magnitude, mixed precision)" in shown
    model = result.best_model()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_sparsity_can_be_searched_and_trials_run_beside_each_other() -> None:
    def build(trial: Any) -> ht.Candidate:
        return wide(sparsity=trial.suggest_float("sparsity", 0.5, 0.95))

    result = ht.search(
        build, trials=3, devices="2xcpu", concurrency=3, seed=1, progress=False, study="several",
        strategy={"name": "sparse", "mask": "magnitude", "precision": "full"},
    )  # fmt: skip
    assert result.completed == 3
    for record in result.trials:
        assert record.plan is not None
        left = record.plan["survivors"] / record.plan["pruned_weights"]
        assert left == pytest.approx(1 - record.params["sparsity"], abs=0.01)


def test_masks_from_a_file_are_used_and_checked(tmp_path: Path) -> None:
    mask = torch.zeros(64, 64)
    mask[:, :3] = 1
    save_file({"2.weight": mask}, str(tmp_path / "own.safetensors"))
    result = searched("own", mask=str(tmp_path / "own.safetensors"), precision="full")
    assert torch.equal(result.best_model().state_dict()["2.weight"] != 0, mask != 0)
    save_file({"2.weight": torch.ones(3)}, str(tmp_path / "wrong.safetensors"))
    with pytest.raises(ht.SearchFailed, match=r"the mask of '2.weight' has the shape \(3,\) \(give one of shape"):
        searched("wrong", mask=str(tmp_path / "wrong.safetensors"))


def test_a_yaml_file_names_the_options(tmp_path: Path) -> None:
    (tmp_path / "y.yaml").write_text(YAML)
    done = run("search", "y.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(run("show", "y", "0", "--json", folder=tmp_path).stdout)
    assert shown["strategy"] == "sparse"
    assert shown["plan"]["mask"] == "magnitude"
    assert shown["plan"]["replicas"] == 2
    assert shown["plan"]["survivors"] < 0.21 * shown["plan"]["pruned_weights"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return undisturbed(*SEARCH, folder=tmp_path_factory.mktemp("unbroken"))


def test_a_killed_member_costs_the_unit_and_nothing_else(tmp_path: Path, unbroken: list[Any]) -> None:
    run_and_lose(*SEARCH, folder=tmp_path, at_checkpoint=True)
    assert values(tmp_path, "s") == unbroken
    assert any(kind == "replicas" and "go on from the last commit" in message for kind, message in events(tmp_path))
    assert attempts(tmp_path) == 2, "no attempt was lost"


def test_a_killed_search_is_resumed_to_the_same_result(tmp_path: Path, unbroken: list[Any]) -> None:
    stop_and_resume(*SEARCH, folder=tmp_path)
    assert values(tmp_path, "s") == unbroken


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sparsity": 1.2}, r"sparsity cannot be 1.2 \(give a number from 0 to below 1"),
    ({"sparsity": "high"}, r"sparsity cannot be 'high'"),
    ({"mask": "magnitud"}, r"mask cannot be 'magnitud' \(did you mean 'magnitude'"),
    ({"mask": "nowhere.safetensors"}, r"there is no mask file 'nowhere.safetensors'"),
    ({"precision": "half"}, r"precision cannot be 'half'"),
    ({"replicas": 0}, r"replicas cannot be 0 \(give a whole number from 1 on\)"),
    ({"replicas": 3}, r"replicas cannot be 3 \(there are 2 devices\)"),
    ({"stages": 0}, r"stages cannot be 0 \(give a whole number from 1 on, or auto\)"),
    ({"stages": "many"}, r"stages cannot be 'many' \(give a whole number from 1 on, or auto\)"),
    ({"stages": 3}, r"stages cannot be 3 \(there are 2 devices\)"),
    ({"stages": 2, "replicas": 2}, r"replicas cannot be 2 with stages 2 \(leave replicas out"),
    ({"shards": True, "replicas": 2}, r"replicas cannot be 2 with shards \(leave replicas out"),
    ({"stages": "auto", "shards": True}, r"stages cannot be 'auto' with shards \(give stages or shards, not both\)"),
    ({"shards": "yes"}, r"shards cannot be 'yes' \(give true or false\)"),
    ({"microbatches": 2}, r"microbatches cannot be 2 without stages \(give stages: auto, or a number\)"),
    ({"stages": 2, "microbatches": 0}, r"microbatches cannot be 0 \(give a whole number from 1 on\)"),
    ({"seats": 1}, r"strategy 'sparse' has no option 'seats'"),
    ({"sparcity": 0.5}, r"strategy 'sparse' has no option 'sparcity' \(did you mean 'sparsity'"),
]


@pytest.mark.parametrize(("options", "said"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ht.HydraTuneError, match=said):
        searched("w", **options)
    assert not Path("hydra_tune.db").exists()


def test_what_cannot_be_pruned_is_said() -> None:
    with pytest.raises(ht.SearchFailed, match="LBFGS"):
        searched("lbfgs", {"optimizer": partial(torch.optim.LBFGS, lr=0.1)})
    with pytest.raises(ht.SearchFailed, match="no weights that could be pruned"):
        searched("none", {"model": nn.LayerNorm(6).double(), "loss": lambda o, t: o.sum()})
    with pytest.raises(ht.HydraTuneError, match=r"Candidate.sparsity cannot be 1"):
        wide(sparsity=1)
