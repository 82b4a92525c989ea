"""The trial that user code sees in a worker: an Optuna trial answered by the coordinator.

The sampler, the pruner and the database are in the coordinator. Suggestions and pruning decisions wait for its answer;
reports and attributes do not wait. All else is Optuna's own code, on a study whose storage forwards to the coordinator.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna._warnings import optuna_warn
from optuna.distributions import BaseDistribution, CategoricalDistribution, check_distribution_compatibility
from optuna.trial import FrozenTrial, Trial, TrialState

from hydra_tune.core.errors import InputError
from hydra_tune.core.metric_value import is_complex
from hydra_tune.training.kept_files import keep_file
from hydra_tune.training.remote_study import RemoteStudy
from hydra_tune.training.trial_line import Line, WorkerLine

if TYPE_CHECKING:
    import torch

    from hydra_tune.training.objective_memory import ObjectiveMemory

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
    files: Path | None = None
    """Directory for what user code keeps with the trial; None on a node of a cluster."""
    trial_id: int = -1
    study_id: int = -1
    study: str = ""
    directions: tuple[str, ...] = ("minimize",)
    devices: tuple[str, ...] = ("cpu",)
    """The worker's devices by torch's names."""


class RemoteTrial(Trial):
    """An Optuna trial that forwards its calls to the coordinator."""

    def __init__(self, info: TrialInfo, line: Line, memory: ObjectiveMemory | None = None) -> None:
        # The parent's `__init__` would read the database and call the sampler.
        self._info = info
        self._line = line
        self._memory = memory
        """Measures the trial's memory until it is known."""
        self._trial_id = info.trial_id
        self._cached_frozen_trial = FrozenTrial(
            number=info.number, state=TrialState.RUNNING, value=None, datetime_start=info.datetime_start,
            datetime_complete=None, params={}, distributions={}, user_attrs=copy.deepcopy(info.user_attrs),
            system_attrs={}, intermediate_values={}, trial_id=info.trial_id,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        """Make the study, and what Optuna's own code keeps beside it, when it is asked for."""
        if name == "study":
            self.study = RemoteStudy(self._info.study_id, self._info.study, self._info.directions, self._line)
        elif name == "storage":
            self.storage = self.study._storage
        elif name == "_fixed_params":
            self._fixed_params = self.storage.get_trial_system_attrs(self._trial_id).get("fixed_params", {})
        elif name in ("relative_search_space", "_relative_params"):
            self._relative_params, self.relative_search_space = self._line.ask("relative_params")
        else:
            raise AttributeError(f"a trial has no attribute {name!r}")
        return self.__dict__[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._info, self._line, self._cached_frozen_trial)

    @property
    def relative_params(self) -> dict[str, Any]:
        return self._relative_params or {}

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        known = self._cached_frozen_trial
        if name in known.distributions:
            check_distribution_compatibility(known.distributions[name], distribution)
            return known.params[name]
        answer = self._line.ask("suggest", str(name), _storable(distribution))
        value = distribution.choices[answer] if isinstance(distribution, CategoricalDistribution) else answer
        known.distributions[name] = distribution
        known.params[name] = value
        return value

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
        if step in self._cached_frozen_trial.intermediate_values:
            optuna_warn(f"The reported value is ignored because this `{step=}` is already reported.")
            return
        self._line.tell("report", value, step)
        if self._memory is not None and (peak := self._memory.peak()) is not None:
            # By its first report a trial has usually trained an epoch, which takes all the memory that it ever takes.
            self._memory = None
            self._line.tell("memory", peak)
        self._cached_frozen_trial.intermediate_values[step] = value

    def should_prune(self) -> bool:
        if self._info.objectives > 1:
            raise NotImplementedError("Trial.should_prune is not supported for multi-objective optimization.")
        return bool(self._line.ask("should_prune"))

    def set_user_attr(self, key: str, value: Any) -> None:
        json.dumps(value)  # the database holds JSON: other values raise here, as in Optuna
        self._line.tell("set_user_attr", str(key), value)
        self._cached_frozen_trial.user_attrs[key] = value

    # Additions to Optuna's trial

    @property
    def objectives(self) -> int:
        return self._info.objectives

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices that the trial may use: one, or as many as `devices_per_trial` says."""
        import torch

        return tuple(torch.device(each) for each in self._info.devices)

    @property
    def checkpoints(self) -> Path | None:
        """Directory for the objective's own checkpoints, kept until the trial has ended, also over a crash."""
        return self._info.checkpoints

    @property
    def checkpoint_seconds(self) -> float:
        return self._info.checkpoint_seconds

    def keep(self, path: str | os.PathLike[str], name: str | None = None) -> Path:
        """Keep a copy of a file or a folder with the trial, for `best` and `export`; return the copy's path.

        It replaces an earlier copy of that name, and stays while the trial is among the study's best.
        """
        if self._info.files is None:
            raise InputError("trial.keep cannot be used on a cluster", "write to storage that all nodes share")
        return keep_file(path, self._info.files, name)

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics besides the reported one."""
        self._line.tell("metrics", step, metrics)

    def checkpointed(self, step: int, size: int, seconds: float) -> None:
        """Report a checkpoint from which a later attempt could resume."""
        self._line.tell("checkpointed", step, size, seconds)

    def note(self, kind: str, message: str) -> None:
        """Record an event."""
        self._line.tell("note", kind, message)

    def stopping(self) -> bool:
        """True if the search is being stopped; the call is also a sign of life."""
        return bool(self._line.ask("stopping"))

    def peak(self, size: int) -> None:
        """Record the peak bytes of tensors."""
        if isinstance(self._line, WorkerLine):
            self._line.peak(size)


def _restored(info: TrialInfo, line: Line, known: FrozenTrial) -> RemoteTrial:
    """Return a trial in another process, with the data it had when it was pickled."""
    trial = RemoteTrial(info, line)
    trial._cached_frozen_trial = known
    return trial


def _storable(distribution: BaseDistribution) -> BaseDistribution:
    """Return the distribution as a database can hold it: a tuple as a list, another object as its text."""
    if not isinstance(distribution, CategoricalDistribution):
        return distribution
    if all(each is None or isinstance(each, bool | int | float | str) for each in distribution.choices):
        return distribution
    stored = copy.copy(distribution)  # a new one would warn of its choices again
    stored.choices = tuple(json.loads(json.dumps(each, default=repr)) for each in distribution.choices)
    return stored


class StoredTrial(optuna.trial.FixedTrial):
    """A trial with parameters from the database, where a choice that is no plain value is in another form."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        choices = tuple(choices)
        stored = _storable(CategoricalDistribution(choices))
        assert isinstance(stored, CategoricalDistribution)
        value = self._params.get(name)
        if value in choices or name not in self._params:
            return super().suggest_categorical(name, choices)
        super().suggest_categorical(name, stored.choices)
        return choices[int(stored.to_internal_repr(value))]


def extended(trial: Any) -> Any:
    """Return the trial with `checkpoints`, `metrics` and the other additions, so that one file runs under Optuna too.

    A trial of a search has them already. A plain Optuna trial gets `checkpoints` None and calls that do nothing.
    """
    if isinstance(trial, RemoteTrial):
        return trial
    trial.checkpoints, trial.checkpoint_seconds = None, TrialInfo.checkpoint_seconds
    for name in ("metrics", "checkpointed", "note", "peak"):
        setattr(trial, name, _nothing)
    trial.stopping, trial.keep = _no, _not_kept
    kind = type(trial)
    trial.__class__ = type(kind.__name__, (kind,), {"devices": property(_own_devices)})  # asked for, it imports torch
    return trial


def _nothing(*_: Any) -> None:
    """Record nothing: there is no search."""


def _not_kept(path: str | os.PathLike[str], name: str | None = None) -> Path:
    """Return the file itself: there is no study to keep it with."""
    return Path(path)


def _own_devices(trial: Any) -> tuple[torch.device, ...]:
    """Return this process's accelerators, or its CPU."""
    import torch

    from hydra_tune.core import accelerator

    return tuple(accelerator.available()) or (torch.device("cpu"),)


def _no() -> bool:
    return False
