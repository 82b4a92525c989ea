"""Conversion of a pruned network's state to blocks, for stages and shards, and back to a checkpoint.

In blocks, a pruned weight is the dense compute tensor, the positions of its survivors and, in mixed precision, the
survivors' master weights; the optimizer's tensors have one entry per survivor. Checkpoints have the form of
`SparseTraining`, however the trial is divided, so each way of training can resume from those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hydra_tune.strategies.shard.checkpoint_forms import CheckpointForm, Tensors
from hydra_tune.strategies.shard.optimizers import OptimizerParts, options_of
from hydra_tune.strategies.shard.plan import index_of, master_of
from hydra_tune.strategies.sparse.layer import gathered, put
from hydra_tune.strategies.sparse.sizes import Layer
from hydra_tune.strategies.sparse.state import CompressedState
from hydra_tune.strategies.sparse.training import SparseTraining
from hydra_tune.training.loop import named_tensors


def block_tensors(weights: CompressedState) -> Tensors:
    """Return the trained parameters, by their names in the blocks."""
    found: Tensors = {name: parameter.data for name, parameter in weights.whole.items()}
    for layer in weights.layers:
        found |= {layer.name: layer.weight.data, index_of(layer.name): layer.index}
        if weights.mixed:
            found[master_of(layer.name)] = layer.master.detach()
    return found


def block_optimizer(weights: CompressedState, parts: OptimizerParts) -> dict[int, dict[str, Any]]:
    """Return the optimizer's state, by the parameters' numbers."""
    whole = weights.optimizer.optimizer.state
    kept = {name: whole.get(parameter, {}) for name, parameter in weights.whole.items()}
    kept |= {layer.name: layer.optimizer.state.get(layer.master, {}) for layer in weights.layers}
    return {index: dict(kept[name]) for index, name in enumerate(parts.order) if kept.get(name)}


def block_state(training: SparseTraining) -> dict[str, Any]:
    """Return a training's state for `take_apart`, without the kept weights: see `PrunedForm`."""
    return {
        **training.rest(),
        "tensors": {**named_tensors(training.model), **block_tensors(training.weights)},
        "gradients": {},
        "optimizer": {
            "state": block_optimizer(training.weights, training.parts),
            "param_groups": [dict(options) for options in options_of(training.optimizer)],
        },
        "kept": None,
    }


def stored_weights(state: Mapping[str, Any], parts: OptimizerParts, trained: set[str]) -> dict[str, Any]:
    """Return a state in blocks in the form of `CompressedState.restore`."""
    tensors = state["tensors"]
    optimizer = {parts.order[index]: kept for index, kept in state["optimizer"]["state"].items()}
    pruned, whole = {}, {}
    for name in sorted(trained & tensors.keys()):
        index = tensors.get(index_of(name))
        if index is None:
            whole[name] = {"values": tensors[name], "optimizer": optimizer.get(name, {})}
            continue
        master = tensors.get(master_of(name))
        values = gathered(tensors[name], index) if master is None else master
        pruned[name] = {"index": index, "values": values, "optimizer": optimizer.get(name, {})}
    return {"pruned": pruned, "whole": whole}


def layers_left(training: SparseTraining) -> dict[str, Layer]:
    """Return the pruned layers of a training."""
    return {
        layer.name: Layer(layer.weight.numel(), len(layer.index), layer.master.dtype)
        for layer in training.weights.layers
    }


@dataclass
class PrunedForm(CheckpointForm):
    """Writes the state of a pruned trial as `SparseTraining` does."""

    between_steps = True

    parts: OptimizerParts
    trained: set[str]
    parameters: set[str]
    """Names of all parameters, trained or not."""
    kept_before: Tensors | None
    """Weights of the best epoch before the trial was cut; dense ones do not match the mask."""
    search: dict[str, Any] | None
    """State of the search for a mask, in a dense trial."""
    first_weights: Tensors | None

    @classmethod
    def of(cls, training: SparseTraining) -> PrunedForm:
        parameters = {name for name, _ in training.model.named_parameters()}
        search = None if training.search is None else training.search.state()
        return cls(
            training.parts, set(training.trained), parameters, training.kept, search, training.first_weights
        )  # fmt: skip

    def checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: tensor for name, tensor in state["tensors"].items() if not _is_part(name, state["tensors"])}
        rest = ("scheduler", "random", "position", "history", "data", "extra")
        return {
            **{name: state[name] for name in rest},
            "kept": self.kept_before if state["kept"] is None else _expanded(state["kept"]),
            "buffers": {name: tensor for name, tensor in tensors.items() if name not in self.parameters},
            "fixed": {n: t for n, t in tensors.items() if n in self.parameters and n not in self.trained},
            "weights": stored_weights(state, self.parts, self.trained),
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in state["optimizer"]["param_groups"]],
            "search": self.search,
            "first_weights": self.first_weights,
        }

    def weights(self, kept: Tensors | None, present: Callable[[], Tensors]) -> Tensors:
        if kept is None and self.kept_before is not None:
            return self.kept_before
        return _expanded(present() if kept is None else kept)


def _is_part(name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """True if a tensor is the index or master of a pruned weight."""
    owner, _, kind = name.rpartition("/")
    return owner in tensors and name in (index_of(owner), master_of(owner)) and bool(kind)


def _expanded(tensors: Tensors) -> Tensors:
    """Return weights as in the candidate, dense and in full precision, from those in blocks."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if _is_part(name, tensors):
            continue
        master = tensors.get(master_of(name))
        if master is None:
            found[name] = tensor
        else:
            found[name] = torch.zeros(tensor.shape, dtype=master.dtype)
            put(found[name], tensors[index_of(name)], master)
    return found
