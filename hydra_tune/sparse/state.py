"""The training state of a pruned network, compressed to the weights that survive (SAMO, arXiv 2302.05045).

The model computes with dense weights, for the sake of dense kernels. All else is stored for the survivors only, with
one int32 index a layer: gradients, optimizer state and, in mixed precision, float32 masters of the 16-bit weights.
Backward hands over each layer's dense gradient the moment it exists; the survivors' part is kept and the rest is
freed, so there is never more than one dense gradient.

Bytes for a layer of n weights of which fn survive, with Adam: 2n + 24fn in mixed precision (16-bit weights; index 4,
16-bit gradient 2, gradient 4, master 4, moments 8, 16-bit copy of the new weights 2) and 4n + 16fn in float32 (weights;
index 4, gradient 4, moments 8), where the survivors' weights are gathered for the step and put back, a layer at a
time. Dense training takes 20n and 16n. Adam's step counter, one number a layer, comes on top in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hydra_tune.shards.optimizers import OptimizerParts, Options
from hydra_tune.sparse.buckets import Buckets
from hydra_tune.sparse.masks import Masks

HALF = torch.bfloat16
"""The 16-bit type: with the exponents of float32, so gradients need no scaling."""


class PrunedLayer:
    """One weight of which only some entries are trained."""

    def __init__(
        self, name: str, weight: nn.Parameter, index: torch.Tensor, gradient: torch.Tensor,
        optimizer: torch.optim.Optimizer, *, mixed: bool,
    ) -> None:  # fmt: skip
        self.name = name
        self.weight = weight
        self.index = index
        self.gradient = gradient
        """Of the survivors: what is reduced over the replicas."""
        self.optimizer = optimizer
        self.master: nn.Parameter = optimizer.param_groups[0]["params"][0]
        self.wide: torch.Tensor | None = None
        """The same in the master's precision, where that is another."""
        self.narrow: torch.Tensor | None = None
        """The new weights in the compute precision."""
        self.pending = False
        """Whether a gradient has come since the last step."""
        with torch.no_grad():
            chosen = weight.detach().reshape(-1).index_select(0, index)
            if mixed:
                self.master.data = chosen
                self.wide, self.narrow = torch.zeros_like(chosen), chosen.to(HALF)
            weight.data = torch.zeros_like(weight, dtype=HALF if mixed else None, memory_format=torch.contiguous_format)
            self._put(chosen if self.narrow is None else self.narrow)

    def gather(self) -> None:
        """Take the survivors' part of the dense gradient, add it to what is there, and free the dense one."""
        dense = self.weight.grad
        assert dense is not None
        flat = dense.reshape(-1)
        if self.wide is None and self.pending:
            self.gradient.add_(flat.index_select(0, self.index))
        else:
            torch.index_select(flat, 0, self.index, out=self.gradient)
        if self.wide is not None and self.pending:
            # A 16-bit sum would lose what the later ones add.
            self.wide.add_(self.gradient)
            self.gradient.copy_(self.wide)
        elif self.wide is not None:
            self.wide.copy_(self.gradient)
        self.pending = True
        self.weight.grad = None

    def norm(self) -> float:
        """Of the gradient, for clipping."""
        return float(torch.linalg.vector_norm(self.gradient.to(self.master.dtype)))

    def step(self, options: Options, factor: float) -> None:
        """The optimizer's step on the survivors, and their new weights into the dense one."""
        self.optimizer.param_groups[0].update(options)
        if self.wide is None:
            self.master.data = self.weight.detach().reshape(-1).index_select(0, self.index)
            self.master.grad = self.gradient
        else:
            self.wide.copy_(self.gradient)
            self.master.grad = self.wide
        if factor != 1.0:
            self.master.grad.mul_(factor)
        self.optimizer.step()
        self.master.grad = None
        self.write_back()
        self.pending = False

    @torch.no_grad()
    def write_back(self) -> None:
        """The survivors' weights into the dense one; without masters of their own, they need not stay."""
        if self.narrow is not None:
            self.narrow.copy_(self.master)
            self._put(self.narrow)
        else:
            self._put(self.master.detach())
            self.master.data = self.master.data.new_empty(0)

    def values(self) -> torch.Tensor:
        """The survivors' weights, in full precision."""
        if self.wide is not None:
            return self.master.detach()
        return self.weight.detach().reshape(-1).index_select(0, self.index)

    def dense(self) -> torch.Tensor:
        """The whole weight in full precision."""
        found = torch.zeros(self.weight.numel(), dtype=self.master.dtype, device=self.weight.device)
        found.index_put_((self.index,), self.values())
        return found.reshape(self.weight.shape)

    def tensors(self) -> list[torch.Tensor]:
        """All that is stored for this layer."""
        kept = [value for value in self.optimizer.state[self.master].values() if isinstance(value, torch.Tensor)]
        return [
            self.weight.data, self.index, self.gradient, self.master.data,
            *(each for each in (self.wide, self.narrow) if each is not None), *(value for value in kept if value.dim()),
        ]  # fmt: skip

    def _put(self, values: torch.Tensor) -> None:
        self.weight.data.view(-1).index_put_((self.index,), values)


def trained_parameters(model: nn.Module, parts: OptimizerParts) -> dict[str, nn.Parameter]:
    """Those that get steps: the optimizer may have been given frozen ones too."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and name in parts.group_of}


class CompressedState:
    """The state of a whole model: pruned layers, and the parameters that are not pruned, which have theirs in full."""

    def __init__(
        self, model: nn.Module, masks: Masks, parts: OptimizerParts, options: Sequence[Options], *, mixed: bool
    ) -> None:
        self.parts = parts
        trained = trained_parameters(model, parts)
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
        """Of what is not pruned."""
        self.replicas = 1
        self.more = False
        """Whether gradients of another batch are to be added before the step."""
        self._clear()
        self._hooks = [
            layer.weight.register_post_accumulate_grad_hook(lambda _p, i=i: self._gather(i))  # type: ignore[no-untyped-call]
            for i, layer in enumerate(self.layers)
        ] + [
            p.register_post_accumulate_grad_hook(lambda _p, i=i: self._arrived(self.dense, i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.whole.values())
        ]

    def close(self) -> None:
        """Leave the model as any other: dense, in full precision, its gradients its own."""
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers:
            layer.weight.data = layer.dense()
        for parameter in self.whole.values():
            parameter.grad = None

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All gradients of a step, as replicas reduce them: of the survivors, and of what is not pruned."""
        return self.compressed.flat, self.dense.flat

    @property
    def sent_bytes(self) -> int:
        """Handed to all-reduce so far, by this replica."""
        return self.compressed.sent_bytes + self.dense.sent_bytes

    def tensors(self) -> list[torch.Tensor]:
        """All that is stored, whatever for; a storage may occur twice."""
        kept = [v for state in self.optimizer.optimizer.state.values() for v in state.values()]
        return [
            *(tensor for layer in self.layers for tensor in layer.tensors()),
            *(p.data for p in self.whole.values()), *self.gradients(),
            *(v for v in kept if isinstance(v, torch.Tensor) and v.dim()),
        ]  # fmt: skip

    def step(self, options: Sequence[Options], clip: float | None) -> None:
        """The optimizer's step, with the gradients of all replicas, clipped by the norm of all."""
        if self.replicas > 1:
            self.compressed.finish()
            self.dense.finish()
        factor = 1.0
        if clip is not None:
            pending = [layer for layer in self.layers if layer.pending or self.replicas > 1]
            norms = [*(layer.norm() for layer in pending), float(torch.linalg.vector_norm(self.dense.flat))]
            factor = min(1.0, clip / (math.hypot(*norms) + 1e-6))
        for layer in self.layers:
            if layer.pending or self.replicas > 1:
                layer.step(options[self.parts.group_of[layer.name]], factor)
        if factor != 1.0:
            self.dense.flat.mul_(factor)
        self.optimizer.update(options)
        self.optimizer.optimizer.step()
        self._clear()

    def _clear(self) -> None:
        self.dense.flat.zero_()
        for parameter, view in zip(self.whole.values(), self.dense.views, strict=True):
            parameter.grad = view.view(parameter.shape)
        if self.replicas > 1:
            self.compressed.flat.zero_()  # a layer that gets no gradient here may get one on another replica

    def _gather(self, index: int) -> None:
        self.layers[index].gather()
        self._arrived(self.compressed, index)

    def _arrived(self, buckets: Buckets, index: int) -> None:
        if self.replicas > 1 and not self.more:
            buckets.arrived(index)
            # One kind after the other: a replica without rows sends in no other order than one whose backward runs.
            if self.compressed.send():
                self.dense.send()

    # State

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every trained parameter in full precision, dense."""
        return {**{layer.name: layer.dense() for layer in self.layers}, **self.whole}

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what is stored, with nothing that can be made of it."""
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
        """Take up a state of the same masks."""
        for layer in self.layers:
            saved = state["pruned"][layer.name]
            layer.master.data = saved["values"].to(layer.weight.device)
            layer.write_back()
            layer.optimizer.state[layer.master] = _moved(saved["optimizer"], layer.weight.device)
        for name, parameter in self.whole.items():
            saved = state["whole"][name]
            parameter.copy_(saved["values"])
            self.optimizer.optimizer.state[parameter] = _moved(saved["optimizer"], parameter.device)

    @torch.no_grad()
    def inherit(self, other: CompressedState) -> None:
        """Take over the optimizer state of the survivors from a state of the same model with fewer or no masks."""
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


def _moved(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    # What has no dimensions, as Adam's step counter, stays on the CPU, where torch keeps it.
    return {k: v.to(device) if isinstance(v, torch.Tensor) and v.dim() else v for k, v in state.items()}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
