"""The arguments of a search, checked together before anything is started or created."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_tune.errors import SpecError, quoted

DEFAULT_STORAGE = "sqlite:///hydra_tune.db"
DIRECTIONS = ("minimize", "maximize")
LONGEST_NAME = 200
WEIGHTS_KEPT = 10
ENDLESS = 10**6
"""So many trials are as many as time allows."""
_ADJECTIVES = "amber brave calm clever daring eager gentle happy keen lively mellow noble proud quick quiet sunny wise"
_ANIMALS = "badger crane dolphin falcon finch gecko heron ibex koala lynx marten newt otter owl puffin raven seal tern"


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What `search` was asked to do. `metrics` and `directions` have one entry for each objective."""

    trials: int
    metrics: tuple[str, ...] = ("loss",)
    directions: tuple[str, ...] = ("minimize",)
    study: str = field(default_factory=lambda: made_up_name())
    storage: str = DEFAULT_STORAGE
    devices: str = "auto"
    device_memory: str | int | None = None
    spill: str | None = None
    strategy: str | Mapping[str, Any] | Sequence[Any] = "auto"
    sampler: Any = "tpe"
    pruner: Any = None
    seed: int | None = None
    timeout: float | None = None
    resume: bool = False
    concurrency: int | None = None
    progress: bool = True
    keep_weights: int = WEIGHTS_KEPT
    """How many of the best trials keep their weights on disk."""
    checkpoint_seconds: float = 10.0
    """How often a running trial is checkpointed; less often where writing takes long."""
    deadline: float | None = None
    """Seconds without a sign of life after which a trial counts as hung; by default derived from measured times."""
    stop_at_timeout: bool = False
    """Whether running trials end at the timeout, with the epochs they have, rather than being finished."""
    enqueue: Sequence[Mapping[str, Any]] = ()
    """Parameters to try first, as with Optuna's `enqueue_trial`."""
    allow_changes: bool = False
    """Whether a resumed study may go on with another build function or search space."""

    def __post_init__(self) -> None:
        _whole("trials", self.trials, least=1)
        _whole("keep_weights", self.keep_weights, least=1)
        if self.concurrency is not None:
            _whole("concurrency", self.concurrency, least=1)
        if self.seed is not None:
            _whole("seed", self.seed, least=0)
            if self.seed >= 2**32:
                raise SpecError(f"seed cannot be {quoted(self.seed)}", "give a number below 2**32")
        for name in ("timeout", "deadline", "checkpoint_seconds"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not value > 0):
                raise SpecError(f"{name} cannot be {quoted(value)}", "give seconds, more than 0")
        if self.stop_at_timeout and self.timeout is None:
            raise SpecError("stop_at_timeout needs a timeout", "give timeout=seconds too")
        _check_enqueued(self.enqueue)
        check_name("study", self.study)
        self._check_objectives()
        if self.spill is not None and not (isinstance(self.spill, str | Path) and Path(self.spill).is_dir()):
            raise SpecError(f"spill cannot be {quoted(self.spill)}", "give a directory that exists")
        if not isinstance(self.storage, str):
            raise SpecError(f"storage cannot be {quoted(self.storage)}", "give a database URL, such as sqlite:///x.db")

    def _check_objectives(self) -> None:
        for metric in self.metrics:
            check_name("metric", metric)
        for direction in self.directions:
            if direction not in DIRECTIONS:
                raise SpecError(f"direction cannot be {quoted(direction)}", "give minimize or maximize")
        if len(self.metrics) != len(self.directions):
            raise SpecError(
                f"there are {len(self.metrics)} metrics and {len(self.directions)} directions",
                "give a direction for each metric",
            )
        if not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise SpecError(f"metric cannot be {quoted(list(self.metrics))}", "name each metric once")

    @property
    def endless(self) -> bool:
        """Whether only time ends the search."""
        return self.trials >= ENDLESS

    def stored(self) -> dict[str, Any]:
        """What of the settings is recorded with the study, as plain data."""
        return {
            "trials": self.trials, "devices": self.devices, "device_memory": self.device_memory,
            "strategy": dict(self.strategy) if isinstance(self.strategy, Mapping) else self.strategy,
            "sampler": _label(self.sampler), "pruner": _label(self.pruner),
            "concurrency": self.concurrency, "keep_weights": self.keep_weights, "spill": self.spill,
            "checkpoint_seconds": self.checkpoint_seconds, "deadline": self.deadline,
        }  # fmt: skip


def make_settings(
    *,
    trials: int,
    metric: str | Sequence[str] = "loss",
    direction: str | Sequence[str] = "minimize",
    study: str | None = None,
    storage: str | None = None,
    **others: Any,
) -> SearchSettings:
    """Settings from the arguments of `ht.search`, with names and places filled in."""
    metrics, directions = _several("metric", metric), _several("direction", direction)
    if others.get("resume") and study is None:
        raise SpecError("resume needs the name of a study", "give study='its name'")
    return SearchSettings(
        trials=trials,
        metrics=metrics,
        directions=directions,
        study=made_up_name() if study is None else study,
        storage=default_storage() if storage is None else storage,
        **others,
    )


def default_storage() -> str:
    """The database that is used when none is named."""
    return os.environ.get("HYDRA_TUNE_STORAGE") or DEFAULT_STORAGE


def made_up_name() -> str:
    """A readable name for a study that was given none."""
    chance = random.SystemRandom()
    adjective, animal = (chance.choice(words.split()) for words in (_ADJECTIVES, _ANIMALS))
    return f"{adjective}-{animal}-{chance.randrange(16**4):04x}"


def check_name(what: str, name: object) -> None:
    """Names are shown in terminals, pages and logs: short, printable, on one line."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable() or name != name.strip():
        raise SpecError(
            f"{what} cannot be named {quoted(name)}",
            f"give 1 to {LONGEST_NAME} printable characters on one line",
        )


def _several(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and value:
        return tuple(value)
    raise SpecError(f"{name} cannot be {quoted(value)}", "give a name, or a list of names for several objectives")


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{name} cannot be {quoted(value)}", f"give a whole number of at least {least}")


def _check_enqueued(enqueue: object) -> None:
    if not isinstance(enqueue, list | tuple) or not all(isinstance(params, Mapping) for params in enqueue):
        raise SpecError(f"enqueue cannot be {quoted(enqueue)}", "give a list of parameters, such as [{'lr': 0.01}]")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(choice: Any) -> Any:
    return choice if choice is None or isinstance(choice, str) else type(choice).__name__
