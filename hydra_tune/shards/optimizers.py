"""One optimizer taken apart into one for each parameter, and the schedule that drives them all.

Every optimizer of torch but LBFGS treats parameters one by one, so a step on each alone is the step on all. The parts
are made as unpickling would make them: from the class, the defaults and the groups' options, without the user's factory
being called again on tensors that are not there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hydra_tune.candidate import SchedulerFactory

Options = dict[str, Any]


@dataclass(frozen=True)
class OptimizerParts:
    """What is needed to make a parameter's own optimizer."""

    kind: type[torch.optim.Optimizer]
    defaults: Options
    group_of: Mapping[str, int]
    """The group of each parameter; one that is in none is not trained."""
    order: tuple[str, ...]
    """The parameters in the order in which the optimizer numbers them."""
    pristine: tuple[Options, ...]
    """The groups' options before a scheduler saw them."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerParts:
        """Take an optimizer apart; `names` gives each parameter's name by its id."""
        group_of: dict[str, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                group_of[names[id(parameter)]] = index
        return cls(type(optimizer), dict(optimizer.defaults), group_of, tuple(group_of), options_of(optimizer))

    def for_parameter(self, parameter: nn.Parameter, options: Options) -> torch.optim.Optimizer:
        """An optimizer of this one parameter, without state."""
        return self._made([{**options, "params": [parameter]}])

    def for_parameters(self, parameters: Mapping[str, nn.Parameter], options: Sequence[Options]) -> Grouped:
        """An optimizer of these parameters, in groups as the whole one has them, without state."""
        groups: dict[int, list[nn.Parameter]] = {}
        for name in self.order:
            if name in parameters:
                groups.setdefault(self.group_of[name], []).append(parameters[name])
        made = self._made([{**options[group], "params": members} for group, members in groups.items()])
        return Grouped(made, tuple(groups))

    def for_schedule(self) -> torch.optim.Optimizer:
        """An optimizer with all groups and no real parameters, for a scheduler to work on."""
        return self._made([{**options, "params": [nn.Parameter(torch.zeros(1))]} for options in self.pristine])

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = self.kind.__new__(self.kind)
        made.__setstate__({"defaults": dict(self.defaults), "state": defaultdict(dict), "param_groups": groups})
        return made


@dataclass(frozen=True)
class Grouped:
    """An optimizer of some parameters, and which groups of the whole one its groups are."""

    optimizer: torch.optim.Optimizer
    groups: tuple[int, ...]

    def update(self, options: Sequence[Options]) -> None:
        """Give its groups the options that the whole one's have now."""
        for group, index in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(options[index])


def options_of(optimizer: torch.optim.Optimizer) -> tuple[Options, ...]:
    """The options of each group: learning rate and so on."""
    return tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)


def moved(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy of a parameter's optimizer state on its device; what has no dimensions, as a step counter, stays."""
    return {k: v.to(device, copy=True) if isinstance(v, torch.Tensor) and v.dim() else v for k, v in state.items()}


class Schedule:
    """The learning-rate schedule of a whole trial, apart from the parameters."""

    def __init__(
        self, parts: OptimizerParts, factory: SchedulerFactory | None, state: Any, groups: Sequence[Options]
    ) -> None:
        self._optimizer = parts.for_schedule()
        self._scheduler = None if factory is None else factory(self._optimizer)
        if self._scheduler is not None and state is not None:
            self._scheduler.load_state_dict(state)
        for group, options in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(options)
        # The scheduler warns when its optimizer never steps; the parts do, elsewhere.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self.options = options_of(self._optimizer)
        """The options of each group now."""

    def state(self) -> Any:
        """For a checkpoint."""
        return None if self._scheduler is None else self._scheduler.state_dict()

    def step(self, judged: float | None = None) -> None:
        """The next step or epoch; a schedule that waits for a plateau is told the loss."""
        if self._scheduler is None:
            return
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            assert judged is not None
            self._scheduler.step(judged)
        else:
            self._scheduler.step()
        self.options = options_of(self._optimizer)
