"""The trial that user code sees in a worker: an Optuna trial answered by the coordinator.

The real Optuna trial, with its sampler, pruner and storage, lives in the coordinator. Suggestions and pruning decisions
wait for its answer; reports and attributes do not wait.
"""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution, CategoricalChoiceType
from optuna.trial import BaseTrial

from hydra_tune.core.metric_value import is_complex

if TYPE_CHECKING:
    from hydra_tune.engine.worker import WorkerContext


CALLS_AHEAD = 200
"""Calls that do not wait for an answer, after which one waits until the coordinator has worked through them."""
LARGEST_STEP = 2**31 - 1
"""Largest step of a report: the column's limit on PostgreSQL, and the same everywhere."""


@dataclass(frozen=True)
class TrialInfo:
    """A trial's data, sent to a worker before user code runs."""

    number: int
    seed: int
    attempt: str
    objectives: int = 1
    user_attrs: dict[str, Any] = field(default_factory=dict)
    datetime_start: datetime.datetime | None = None
    checkpoints: Path | None = None
    """Directory for an objective's own checkpoints; removed when the trial has ended."""
    checkpoint_seconds: float = 10.0


class RemoteTrial(BaseTrial):
    """An Optuna trial that forwards its calls to the coordinator."""

    def __init__(self, info: TrialInfo, context: WorkerContext) -> None:
        self._info = info
        self._context = context
        self._unit = context.unit
        """Unit of this trial: threads that outlive it must not act for the next trial."""
        self._params: dict[str, Any] = {}
        self._told = 0
        self._user_attrs = dict(info.user_attrs)

    def _ask(self, name: str, *args: Any) -> Any:
        return self._context.ask(self._unit, name, *args)

    def _tell(self, name: str, *args: Any) -> None:
        self._context.tell(self._unit, name, *args)
        self._told += 1
        if self._told % CALLS_AHEAD == 0:
            self._ask("caught_up")  # so that calls do not pile up in the coordinator's memory

    def _suggest(self, method: str, name: str, *args: Any, **options: Any) -> Any:
        value = self._ask(method, str(name), args, options)
        self._params[name] = value
        return value

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        step = None if step is None else float(step)
        return float(self._suggest("suggest_float", name, float(low), float(high), step=step, log=bool(log)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return int(self._suggest("suggest_int", name, int(low), int(high), step=int(step), log=bool(log)))

    def suggest_categorical(  # type: ignore[override]
        self, name: str, choices: Sequence[CategoricalChoiceType]
    ) -> CategoricalChoiceType:
        choices = tuple(choices)
        for each in choices:
            if each is not None and not isinstance(each, bool | int | float | str):
                raise TypeError(f"choices of {name!r} must be None, bool, int, float or str, not {each!r}")
        choice: CategoricalChoiceType = self._suggest("suggest_categorical", name, choices)
        return choice

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        return self.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        return self.suggest_float(name, low, high, step=q)

    def report(self, value: float, step: int) -> None:
        if self._info.objectives > 1:
            raise NotImplementedError("Trial.report is not supported for multi-objective optimization.")
        if is_complex(value):
            raise TypeError(f"report needs a real number as value, not {value!r}")
        try:
            value = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"report needs a number as value, not {value!r}") from None
        try:
            step = int(step)
        except (TypeError, ValueError):
            raise TypeError(f"report needs a whole number as step, not {step!r}") from None
        if step < 0:
            raise ValueError(f"report needs a step of at least 0, not {step}")
        if step > LARGEST_STEP:
            raise ValueError(f"report needs a step of at most {LARGEST_STEP}, not {step}: count in thousands, say")
        self._tell("report", value, step)

    def should_prune(self) -> bool:
        return bool(self._ask("should_prune"))

    def set_user_attr(self, key: str, value: Any) -> None:
        json.dumps(value)  # the database holds JSON: other values raise here, as in Optuna
        self._tell("set_user_attr", str(key), value)
        self._user_attrs[key] = value

    def set_constraint(self, key: str, value: float) -> None:
        self._ask("set_constraint", str(key), float(value))

    @property
    def params(self) -> dict[str, Any]:
        return dict(self._params)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        distributions: dict[str, BaseDistribution] = self._ask("distributions")
        return distributions

    @property
    def user_attrs(self) -> dict[str, Any]:
        return copy.deepcopy(self._user_attrs)

    @property
    def constraints(self) -> dict[str, float]:
        constraints: dict[str, float] = self._ask("constraints")
        return constraints

    @property
    def datetime_start(self) -> datetime.datetime | None:
        return self._info.datetime_start

    @property
    def number(self) -> int:
        return self._info.number

    # Additions to Optuna's trial

    @property
    def objectives(self) -> int:
        return self._info.objectives

    @property
    def checkpoints(self) -> Path | None:
        return self._info.checkpoints

    @property
    def checkpoint_seconds(self) -> float:
        return self._info.checkpoint_seconds

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics besides the reported one."""
        self._tell("metrics", step, metrics)

    def checkpointed(self, step: int, size: int, seconds: float) -> None:
        """Report a checkpoint from which a later attempt could resume."""
        self._tell("checkpointed", step, size, seconds)

    def note(self, kind: str, message: str) -> None:
        """Record an event."""
        self._tell("note", kind, message)

    def stopping(self) -> bool:
        """True if the search is being stopped; the call is also a sign of life."""
        return bool(self._ask("stopping"))

    def peak(self, size: int) -> None:
        """Record the peak bytes of tensors."""
        self._context.unit_peak_bytes = max(self._context.unit_peak_bytes or 0, size)

    @property
    def study(self) -> Any:
        raise AttributeError("a trial in a worker has no study: it lives in the coordinator; use ht.search's result")
