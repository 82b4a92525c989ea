"""The training state of a pruned network, compressed to the surviving weights (SAMO, arXiv 2302.05045).

The model computes with dense weights, so that dense kernels can be used. Everything else is stored for the survivors
only, with one int32 index per layer: gradients, optimizer state and, in mixed precision, float32 masters of the 16-bit
weights. As soon as backward produces a layer's dense gradient, the survivors' part is kept and the rest freed, so at
most one dense gradient exists at a time.

Bytes for a layer of n weights of which fn survive, with Adam: 2n + 24fn in mixed precision (16-bit weights; index 4,
16-bit gradient 2, gradient 4, master 4, moments 8, 16-bit copy of the new weights 2) and 4n + 16fn in float32 (weights;
index 4, gradient 4, moments 8), where the survivors' weights are gathered for the step and written back, one layer at a
time. Dense training needs 20n and 16n. Adam's step counter, one number per layer, is extra in all cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hydra_tune.engine.collectives import all_reduce
from hydra_tune.graph.program import HALF
from hydra_tune.strategies.shard.optimizers import OptimizerParts, Options, moved
from hydra_tune.strategies.sparse.buckets import Buckets
from hydra_tune.strategies.sparse.layer import PrunedLayer
from hydra_tune.strategies.sparse.masks import Masks


def trained_parameters(model: nn.Module, parts: OptimizerParts) -> dict[str, nn.Parameter]:
    """Return the parameters that get steps; frozen ones given to the optimizer are left out."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and name in parts.group_of}


class CompressedState:
    """The training state of a model: compressed for pruned layers, in full for other parameters."""

    def __init__(
        self, trained: Mapping[str, nn.Parameter], masks: Masks, parts: OptimizerParts, options: Sequence[Options], *,
        mixed: bool,
    ) -> None:  # fmt: skip
        """`trained` are the parameters that get steps: those of a model, or of the part on this device."""
        self.parts = parts
        self.mixed = mixed
        pruned = [name for name in trained if name in masks]
        self.whole = {name: p for name, p in trained.items() if name not in masks}
        device = next(iter(trained.values())).device if trained else torch.device("cpu")
        of_pruned = [trained[name] for name in pruned]
        kind = HALF if mixed else (of_pruned[0].dtype if of_pruned else torch.float32)
        self.compressed = Buckets([len(masks[name]) for name in pruned], kind, device)
        wide = next((p.dtype for p in self.whole.values()), torch.float32)
        self.dense = Buckets([p.numel() for p in self.whole.values()], wide, device)
        self.layers = [
            PrunedLayer(
                name, weight, masks[name].to(device), gradient,
                parts.for_parameter(nn.Parameter(weight.data.new_empty(0)), options[parts.group_of[name]]), mixed=mixed,
            )
            for name, weight, gradient in zip(pruned, of_pruned, self.compressed.views, strict=True)
        ]  # fmt: skip
        self.optimizer = parts.for_parameters(self.whole, options)
        """Optimizer of the parameters that are not pruned."""
        self.replicas = 1
        self.more = False
        """True if gradients of another batch will be added before the step."""
        self.used: set[str] = set()
        """Unpruned parameters that got a gradient since the last step."""
        self._clear()
        self._hooks = [
            layer.weight.register_post_accumulate_grad_hook(lambda _p, i=i: self._gather(i))  # type: ignore[no-untyped-call]
            for i, layer in enumerate(self.layers)
        ] + [
            p.register_post_accumulate_grad_hook(lambda _p, i=i, n=n: self._use(i, n))  # type: ignore[no-untyped-call]
            for i, (n, p) in enumerate(self.whole.items())
        ]

    def let_go(self) -> None:
        """Remove the gradient hooks; the weights stay as they are."""
        for hook in self._hooks:
            hook.remove()

    def close(self) -> None:
        """Restore a normal model: dense, in full precision, with gradients of its own."""
        self.let_go()
        for layer in self.layers:
            layer.weight.data = layer.dense()
        for parameter in self.whole.values():
            parameter.grad = None

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all gradients of a step as replicas reduce them: the survivors', and those of unpruned parameters."""
        return self.compressed.flat, self.dense.flat

    @property
    def sent_bytes(self) -> int:
        """Bytes this replica has passed to all-reduce so far."""
        return self.compressed.sent_bytes + self.dense.sent_bytes

    def tensors(self) -> list[torch.Tensor]:
        """Return all stored tensors; several may share a storage."""
        kept = [v for state in self.optimizer.optimizer.state.values() for v in state.values()]
        return [
            *(tensor for layer in self.layers for tensor in layer.tensors()),
            *(p.data for p in self.whole.values()), *self.gradients(),
            *(v for v in kept if isinstance(v, torch.Tensor) and v.dim()),
        ]  # fmt: skip

    def state_bytes(self) -> int:
        """Return the bytes of all stored tensors, counting each storage once."""
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors()}.values())

    def moments(self) -> int:
        """Return the largest number of tensors the optimizer keeps for a parameter."""
        kept = [*self.optimizer.optimizer.state.values(), *(each.optimizer.state[each.master] for each in self.layers)]
        return max(
            (sum(isinstance(v, torch.Tensor) and v.dim() > 0 for v in state.values()) for state in kept), default=0
        )

    def step(self, options: Sequence[Options], clip: float | None) -> None:
        """Run the optimizer's step with the gradients of all replicas, clipped by their total norm."""
        if self.replicas > 1:
            self.compressed.finish()
            self.dense.finish()
            self._agree()
        factor = 1.0
        if clip is not None:
            factor = min(1.0, clip / (math.hypot(*self.norms().values()) + 1e-6))
        self.step_by(options, factor)

    def norms(self) -> dict[str, float]:
        """Return the norm of each gradient that has arrived."""
        whole = zip(self.whole, self.dense.views, strict=True)
        return {
            **{layer.name: layer.norm() for layer in self.layers if layer.pending},
            **{name: float(torch.linalg.vector_norm(view)) for name, view in whole if name in self.used},
        }

    def step_by(self, options: Sequence[Options], factor: float) -> None:
        """Run the step with gradients scaled by `factor`; parameters without a gradient are skipped."""
        for layer in self.layers:
            if layer.pending:
                layer.step(options[self.parts.group_of[layer.name]], factor)
        if factor != 1.0:
            self.dense.flat.mul_(factor)
        for name, parameter in self.whole.items():
            if name not in self.used:
                parameter.grad = None
        self.optimizer.update(options)
        self.optimizer.optimizer.step()
        self._clear()

    def _agree(self) -> None:
        """Share which parameters got a gradient on any replica: one byte per parameter."""
        came = [*(layer.pending for layer in self.layers), *(name in self.used for name in self.whole)]
        anywhere = torch.tensor(came, dtype=torch.uint8, device=self.dense.flat.device)
        all_reduce(anywhere, dist.ReduceOp.MAX)
        found = anywhere.tolist()
        for layer, came_in in zip(self.layers, found, strict=False):
            layer.pending = bool(came_in)
        self.used = {name for name, came_in in zip(self.whole, found[len(self.layers) :], strict=True) if came_in}

    def _clear(self) -> None:
        self.used.clear()
        self.dense.flat.zero_()
        for parameter, view in zip(self.whole.values(), self.dense.views, strict=True):
            parameter.grad = view.view(parameter.shape)
        if self.replicas > 1:
            self.compressed.flat.zero_()  # a layer without a gradient here may get one on another replica

    def _gather(self, index: int) -> None:
        self.layers[index].gather()
        self._arrived(self.compressed, index)

    def _use(self, index: int, name: str) -> None:
        self.used.add(name)
        self._arrived(self.dense, index)

    def _arrived(self, buckets: Buckets, index: int) -> None:
        if self.replicas > 1 and not self.more:
            buckets.arrived(index)
            # First all compressed buckets, then the dense ones: every replica sends in this order, even one without
            # rows.
            if self.compressed.send():
                self.dense.send()

    # State

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return every trained parameter, dense and in full precision."""
        return {**{layer.name: layer.dense() for layer in self.layers}, **self.whole}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without derived tensors."""
        return {
            "pruned": {
                layer.name: {
                    "index": layer.index, "values": layer.values(),
                    "optimizer": dict(layer.optimizer.state.get(layer.master, {})),
                }
                for layer in self.layers
            },
            "whole": {
                name: {"values": p.data, "optimizer": dict(self.optimizer.optimizer.state.get(p, {}))}
                for name, p in self.whole.items()
            },
        }  # fmt: skip

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a state with the same masks."""
        for layer in self.layers:
            saved = state["pruned"][layer.name]
            layer.master.data = saved["values"].to(layer.weight.device, copy=True)  # not a view into a larger block
            layer.write_back()
            layer.optimizer.state[layer.master] = moved(saved["optimizer"], layer.weight.device)
        for name, parameter in self.whole.items():
            saved = state["whole"][name]
            parameter.copy_(saved["values"])
            self.optimizer.optimizer.state[parameter] = moved(saved["optimizer"], parameter.device)

    @torch.no_grad()
    def inherit(self, other: CompressedState) -> None:
        """Take over the survivors' optimizer state from a state of the same model with fewer or no masks."""
        whole = other.optimizer.optimizer.state
        for layer in self.layers:
            before = whole.get(other.whole[layer.name], {})
            layer.optimizer.state[layer.master] = {
                key: value.reshape(-1).index_select(0, layer.index)
                if isinstance(value, torch.Tensor) and value.shape == layer.weight.shape else _copied(value)
                for key, value in before.items()
            }  # fmt: skip
        for parameter in self.whole.values():
            self.optimizer.optimizer.state[parameter] = {k: _copied(v) for k, v in whole.get(parameter, {}).items()}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
