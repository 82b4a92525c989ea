"""Takes one optimizer apart into one for each parameter, and drives them all by one schedule.

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

from hydra_tune.core.errors import CandidateError
from hydra_tune.training.candidate import SchedulerFactory

Options = dict[str, Any]


@dataclass(frozen=True)
class OptimizerParts:
    """Class, defaults and groups of an optimizer, from which an optimizer of any of its parameters is made."""

    kind: type[torch.optim.Optimizer]
    defaults: Options
    group_of: Mapping[str, int]
    """Group of each parameter by name; a parameter in no group is not trained."""
    order: tuple[str, ...]
    """Names of the parameters in the order in which the optimizer numbers them."""
    pristine: tuple[Options, ...]
    """Options of each group before a scheduler saw them."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerParts:
        """Take an optimizer apart; `names` gives each parameter's name by its id."""
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise CandidateError("the optimizer has hooks of its steps, which are made parameter by parameter here",
                                 "use strategy whole")  # fmt: skip
        group_of: dict[str, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                group_of[names[id(parameter)]] = index
        return cls(type(optimizer), dict(optimizer.defaults), group_of, tuple(group_of), options_of(optimizer))

    def for_parameter(self, parameter: nn.Parameter, options: Options) -> torch.optim.Optimizer:
        """Return an optimizer of this one parameter, without state."""
        return self._made([{**options, "params": [parameter]}])

    def for_parameters(self, parameters: Mapping[str, nn.Parameter], options: Sequence[Options]) -> Grouped:
        """Return an optimizer of these parameters, with the whole optimizer's groups, without state."""
        groups: dict[int, list[nn.Parameter]] = {}
        for name in self.order:
            if name in parameters:
                groups.setdefault(self.group_of[name], []).append(parameters[name])
        made = self._made([{**options[group], "params": members} for group, members in groups.items()])
        return Grouped(made, tuple(groups))

    def for_schedule(self) -> torch.optim.Optimizer:
        """Return an optimizer with all groups and no real parameters, for a scheduler to work on."""
        return self._made([{**options, "params": [nn.Parameter(torch.zeros(1))]} for options in self.pristine])

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = self.kind.__new__(self.kind)
        made.__setstate__({"defaults": dict(self.defaults), "state": defaultdict(dict), "param_groups": groups})
        return made


@dataclass(frozen=True)
class Grouped:
    """An optimizer of some parameters; `groups` has for each of its groups the index in the whole optimizer."""

    optimizer: torch.optim.Optimizer
    groups: tuple[int, ...]

    def update(self, options: Sequence[Options]) -> None:
        """Set the options of its groups to those that the whole optimizer's groups have now."""
        for group, index in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(options[index])


def options_of(optimizer: torch.optim.Optimizer) -> tuple[Options, ...]:
    """Return the options of each group, such as the learning rate."""
    return tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)


def moved(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a copy of a parameter's optimizer state on `device`; numbers, such as a step counter, stay."""
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
        """Present options of each group."""

    def state(self) -> Any:
        """Return the scheduler's state for a checkpoint; None if there is no scheduler."""
        return None if self._scheduler is None else self._scheduler.state_dict()

    def step(self, judged: float | None = None) -> None:
        """Advance the schedule by a step or an epoch; `judged` is the loss, for a schedule that waits for a plateau."""
        if self._scheduler is None:
            return
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            assert judged is not None
            self._scheduler.step(judged)
        else:
            self._scheduler.step()
        self.options = options_of(self._optimizer)
