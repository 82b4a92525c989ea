"""The optimizer's steps of a trial in shards, parameter by parameter, from blocks that are here for the moment.

A parameter has its own optimizer, whose state is attached for the step and let go after it. Of a pruned one only the
survivors make the step: their part of the dense gradient is taken the moment that exists, and their new weights go
back into the dense one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hydra_tune.graph.program import HALF
from hydra_tune.shards.logbook import as_scalar, plain_scalar
from hydra_tune.shards.optimizers import OptimizerParts, Options
from hydra_tune.shards.plan import Bundle, index_of, master_of
from hydra_tune.shards.runner import ShardRunner, Step


@dataclass
class _Survivors:
    """A pruned weight's blocks, as far as they are here."""

    index: torch.Tensor
    master: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    """Where gradients gather, if the step has to wait for others."""


@dataclass
class Steps:
    """Makes the steps of one trial in one worker."""

    parameters: dict[str, nn.Parameter]
    parts: OptimizerParts
    device: torch.device
    mixed: bool
    ready: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Parameters whose optimizer state is here: they make their steps as soon as their gradients are done."""
    done: set[str] = field(default_factory=set)
    """Those that have."""
    _pruned: dict[str, _Survivors] = field(default_factory=dict)
    _optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)

    def bring_gradients(self, runner: ShardRunner, step: Step, bundle: Bundle) -> None:
        """Let the gradients of a bundle gather in its block."""
        for name, view in runner.attach_gradients(step, bundle).items():
            self._pruned[name].gradient = view

    def bring_index(self, step: Step, bundle: Bundle) -> None:
        """Know the survivors of a bundle, to take their part of dense gradients."""
        for key, layout in bundle.survivors.items():
            if key.startswith("i/"):
                views = layout.views(step.hold(key))
                self._pruned |= {name: _Survivors(views[index_of(name)]) for name in bundle.pruned}

    def bring_optimizer(self, step: Step, bundle: Bundle) -> None:
        """Bring the optimizer state of a bundle; its parameters make their steps from now on."""
        views: dict[str, torch.Tensor] = {}
        for key, layout in bundle.optimizer.items():
            views |= layout.views(step.hold(key))
            step.change(key)
        for key, layout in bundle.survivors.items():
            if key.startswith("m/"):
                masters = layout.views(step.hold(key))
                step.change(key)
                for name in bundle.pruned:
                    self._pruned[name].master = masters[master_of(name)]
        step.change(f"w/{bundle.name}")
        for name in bundle.parameters:
            if name in self.parts.group_of:
                prefix = f"{name}/"
                self.ready[name] = {k.removeprefix(prefix): v for k, v in views.items() if k.startswith(prefix)}

    def let_go(self) -> None:
        """The blocks go."""
        self.ready.clear()
        self.done.clear()
        self._pruned.clear()

    def gather(self, name: str) -> None:
        """Of a pruned weight's dense gradient, add the survivors' part to what waits; the rest is freed."""
        survivors = self._pruned.get(name)
        parameter = self.parameters[name]
        if survivors is not None and survivors.gradient is not None and parameter.grad is not None:
            survivors.gradient.add_(parameter.grad.reshape(-1).index_select(0, survivors.index))
            parameter.grad = None

    def gradient(self, name: str) -> torch.Tensor:
        """A parameter's gradient, or that of its survivors."""
        dense, survivors = self.parameters[name].grad, self._pruned.get(name)
        if survivors is None:
            assert dense is not None
            return dense
        found = survivors.gradient
        if found is None:
            assert dense is not None
            found = dense.reshape(-1).index_select(0, survivors.index)
        # As replicas exchange it: in 16 bits.
        return found.to(HALF).float() if self.mixed else found

    def make(
        self, name: str, options: Options, before: dict[str, Any] | None, factor: float | torch.Tensor | None = None
    ) -> dict[str, Any]:
        """One parameter's step, its gradient times `factor` and then used up.

        `before` is what its optimizer keeps besides tensors, None in its first step; the same is given back.
        """
        self.done.add(name)
        parameter, survivors = self.parameters[name], self._pruned.get(name)
        gradient = self.gradient(name)
        if factor is not None:
            gradient.mul_(factor)
        optimizer = self._optimizers.get(name)
        if optimizer is None:
            own = parameter if survivors is None else nn.Parameter(gradient.new_empty(0))
            optimizer = self._optimizers[name] = self.parts.for_parameter(own, options)
        target: nn.Parameter = optimizer.param_groups[0]["params"][0]
        if survivors is not None:
            chosen = parameter.detach().reshape(-1).index_select(0, survivors.index)
            target.data = chosen if survivors.master is None else survivors.master
            target.grad = gradient
        kept = self._stepped(optimizer, target, options, self.ready[name], before)
        if survivors is not None:
            parameter.data.view(-1).index_put_((survivors.index,), target.detach().to(parameter.dtype))
            target.data, target.grad = target.data.new_empty(0), None
        parameter.grad = None
        return kept

    def _stepped(
        self, optimizer: torch.optim.Optimizer, target: nn.Parameter, options: Options,
        views: dict[str, torch.Tensor], before: dict[str, Any] | None,
    ) -> dict[str, Any]:  # fmt: skip
        optimizer.param_groups[0].update(options)
        if before is not None:
            scalars = {key: as_scalar(value, self.device) for key, value in before.items()}
            optimizer.state[target] = {**views, **scalars}
        optimizer.step()
        state = optimizer.state.pop(target, {})
        for key, value in state.items():
            if key in views and value is not views[key]:
                views[key].copy_(value)
        return {key: plain_scalar(value) for key, value in state.items() if key not in views}
