"""Makes the optimizer steps of a trial in shards, parameter by parameter, with the blocks that are on the device.

Each parameter has its own optimizer, whose state is attached for the step and released after it. In a pruned parameter
only the survivors make the step: their part of the dense gradient is taken as soon as it exists, and their new weights
are written back into the dense parameter.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hydra_tune.graph.program import HALF
from hydra_tune.strategies.shard.held_blocks import HeldBlocks
from hydra_tune.strategies.shard.logbook import as_scalar, plain_scalar
from hydra_tune.strategies.shard.optimizers import OptimizerParts, Options
from hydra_tune.strategies.shard.plan import Bundle, index_of, master_of
from hydra_tune.strategies.shard.runner import ShardRunner


@dataclass
class _Survivors:
    """Blocks of a pruned parameter's survivors that are on the device."""

    index: torch.Tensor
    master: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    """Sum of the survivors' gradients, if the step has to wait for others."""


@dataclass
class OptimizerSteps:
    """Makes the steps of one trial in one worker."""

    parameters: dict[str, nn.Parameter]
    parts: OptimizerParts
    device: torch.device
    mixed: bool
    ready: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Optimizer state, by name, of the parameters that can make their steps now."""
    _pruned: dict[str, _Survivors] = field(default_factory=dict)
    _optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)

    def bring_gradients(self, runner: ShardRunner, bundle: Bundle) -> None:
        """Attach the waiting gradients of a bundle to its parameters."""
        for name, view in runner.gradients(bundle).items():
            if name in bundle.pruned:
                self._pruned[name].gradient = view
            else:
                self.parameters[name].grad = view

    def bring_index(self, held: HeldBlocks, bundle: Bundle) -> None:
        """Load the positions of a bundle's survivors, to take their part of dense gradients."""
        if bundle.pruned <= self._pruned.keys():
            return
        for key, layout in bundle.survivors.items():
            if key.startswith("i/"):
                views = layout.views(held.hold(key))
                self._pruned |= {name: _Survivors(views[index_of(name)]) for name in bundle.pruned}

    def bring_optimizer(self, held: HeldBlocks, bundle: Bundle) -> None:
        """Load the optimizer state of a bundle, so that its parameters can make their steps."""
        if any(name in self.ready for name in bundle.parameters):
            return
        views: dict[str, torch.Tensor] = {}
        for key, layout in bundle.optimizer.items():
            views |= layout.views(held.hold(key))
            held.change(key)
        for key, layout in bundle.survivors.items():
            if key.startswith("m/"):
                masters = layout.views(held.hold(key))
                held.change(key)
                for name in bundle.pruned:
                    self._pruned[name].master = masters[master_of(name)]
        held.change(f"w/{bundle.name}")
        for name in bundle.parameters:
            if name in self.parts.group_of:
                prefix = f"{name}/"
                self.ready[name] = {k.removeprefix(prefix): v for k, v in views.items() if k.startswith(prefix)}

    def let_go(self, but: Collection[str] = ()) -> None:
        """Forget all blocks on the device, except those of the parameters in `but`."""
        self.ready = {name: state for name, state in self.ready.items() if name in but}
        self._pruned = {name: survivors for name, survivors in self._pruned.items() if name in but}

    def gather(self, name: str, waiting: torch.Tensor) -> None:
        """Add a parameter's gradient, or its survivors' part of it, to the sum that waits for its step."""
        parameter, survivors = self.parameters[name], self._pruned.get(name)
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        with torch.no_grad():
            waiting.add_(gradient if survivors is None else gradient.reshape(-1).index_select(0, survivors.index))

    def waiting(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return a waiting gradient as the norm counts it: in mixed precision survivors' are rounded to 16 bits."""
        return gradient.to(HALF).float() if self.mixed and name in self._pruned else gradient

    def gradient(self, name: str) -> torch.Tensor:
        """Return a parameter's gradient, or that of its survivors."""
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
        """Make one parameter's step with its gradient times `factor`; the gradient is used up.

        `before` has the plain numbers of its optimizer state, None in its first step; return those after the step.
        """
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
