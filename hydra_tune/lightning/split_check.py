"""Tests on one batch whether a LightningModule's steps can be split at `forward`.

A module can be split if each step calls forward once, draws no random numbers outside of it, and computes the same loss
or logs from the outputs alone, in a copy of the module without its contents: strategies keep parameters and buffers
elsewhere.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.core.errors import CandidateError
from hydra_tune.core.random_state import RandomState
from hydra_tune.graph.capture import untouched
from hydra_tune.lightning.steps import OBJECTIVE, Before, Rest, Step, loss_of, run_step
from hydra_tune.strategies.shard.prepare import hollow


@dataclass(frozen=True)
class StepCheck:
    """The result of a step on a pilot batch; `whole_because` is the reason why it cannot be split, empty if it can."""

    returned: Any
    logs: dict[str, Any]
    whole_because: str = ""


def try_step(module: Any, step: Step, batch: Any) -> StepCheck:
    """Run a step on a batch, whole and split."""
    before, after = [], []
    outputs: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        before.append(RandomState.capture())
        made = type(module).forward(module, *args, **kwargs)
        after.append(RandomState.capture())
        outputs.append(tree_map(_detached, made))
        return made

    module.train(step == "training_step")
    with untouched(module), torch.set_grad_enabled(step == "training_step"):
        began = RandomState.capture()
        try:
            returned, logs = run_step(module, step, batch, 0, forward)
        except CandidateError:
            raise
        except Exception as error:
            raise CandidateError(
                f"{step} fails on a batch without a Trainer ({type(error).__name__}: {error})", OBJECTIVE
            ) from error
        ended = RandomState.capture()
    if step == "training_step":
        returned = loss_of(returned).detach()
    if len(outputs) != 1:
        times = "does not call forward, self(...)" if not outputs else f"calls forward {len(outputs)} times"
        return StepCheck(returned, logs, f"{step} {times}")
    if not (began.same_as(before[0]) and after[0].same_as(ended)):
        return StepCheck(returned, logs, f"{step} draws random numbers outside of forward")
    return StepCheck(returned, logs, _difference(module, step, batch, outputs[0], returned, logs))


def _difference(module: Any, step: Step, batch: Any, outputs: Any, returned: Any, logs: dict[str, Any]) -> str:
    """Return the reason why the rest of the step does not depend only on forward's outputs and the batch, or ""."""
    empty = copy.deepcopy(module)
    hollow(empty)
    try:
        inputs, targets = Before(empty, step)(batch, 0)
        expected, _ = Before(module, step)(batch, 0)
        found, found_logs = Rest(empty, step).run(outputs, targets)
    except Exception as error:  # noqa: BLE001 - user code that finds its module empty may raise anything
        return f"{step} uses more of the module than its forward's outputs ({type(error).__name__})"
    if step == "training_step":
        same = _equal(loss_of(found), returned)
    else:
        same = _equal(list(found_logs.values()), list(logs.values())) and list(found_logs) == list(logs)
    if not same or not _equal(inputs, expected):
        return f"{step} uses parameters or buffers of the module outside of its forward"
    return ""


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = tree_leaves(one), tree_leaves(other)
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.detach(), other.detach())
    return type(one) is type(other)
