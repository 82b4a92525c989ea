"""Settings of a search: declared once, in `SearchSettings`, and checked together before anything is started.

The flags of `hydra-tune search`, the keys of a YAML file and the settings stored with a study follow from the
declaration. The signature of `ht.search` is written out a second time, for editors and `help`; tests compare it, and
the table in docs/usage.md, with this one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_tune.coordinator import checks
from hydra_tune.coordinator.parts import plain, split
from hydra_tune.core.errors import SpecError

if TYPE_CHECKING:
    import optuna

DEFAULT_STORAGE = "sqlite:///hydra_tune.db"
ENDLESS = 10**6
"""Number of trials that means as many as time allows."""
_ADJECTIVES = "amber brave calm clever daring eager gentle happy keen lively mellow noble proud quick quiet sunny wise"
_ANIMALS = "badger crane dolphin falcon finch gecko heron ibex koala lynx marten newt otter owl puffin raven seal tern"


def default_storage() -> str:
    """Return the URL of the default database."""
    return os.environ.get("HYDRA_TUNE_STORAGE") or DEFAULT_STORAGE


def made_up_name() -> str:
    """Return a readable name for a study without one."""
    chance = random.SystemRandom()
    adjective, animal = (chance.choice(words.split()) for words in (_ADJECTIVES, _ANIMALS))
    return f"{adjective}-{animal}-{chance.randrange(16**4):04x}"


def _setting(
    help: str,
    flag: Any = str,
    *,
    stored: bool = False,
    check: Callable[[str, Any], None] | None = None,
    **default: Any,
) -> Any:
    """Declare a field of `SearchSettings`; `default` is the field's `default` or `default_factory`.

    `flag` is the type of its flag, or None if it has no flag. A `stored` setting is recorded with the study. `check`
    raises SpecError for a bad value; it is not called for a None that is the default.
    """
    return field(**default, metadata={"help": help, "flag": flag, "stored": stored, "check": check})


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of a search. The fields are the arguments of `search`, in the order of the flags."""

    trials: int = _setting(
        "Total number of trials of the study; without it the search runs until the timeout or a stop.",
        int,
        default_factory=lambda: ENDLESS,
        stored=True,
        check=checks.whole,
    )
    n_trials: int | None = _setting(
        "Number of trials to run now, in addition to those of an existing study.",
        int,
        default=None,
        check=checks.whole,
    )
    metric: str | Sequence[str] | None = _setting(
        "Metric to optimise; default the loss, or the value that an objective returns. Repeat for several objectives.",
        list[str],
        default=None,
        check=checks.metrics,
    )
    direction: str | Sequence[str] = _setting(
        "minimize or maximize, for each metric.", list[str], default="minimize", check=checks.directions
    )
    study: str = _setting("Name of the study; made up when not given.", default_factory=made_up_name, check=checks.name)
    storage: str = _setting(
        "Database URL; else $HYDRA_TUNE_STORAGE, else sqlite:///hydra_tune.db.",
        default_factory=default_storage,
        check=checks.url,
    )
    devices: str = _setting(
        "auto, 2xcpu, or cuda:0,cuda:1; cuda:0/2 for two trials on one device.", default="auto", stored=True
    )
    devices_per_trial: int = _setting(
        "Devices that each trial of an objective has.", int, default=1, stored=True, check=checks.whole
    )
    device_memory: str | int | None = _setting("Budget of each device, such as 8GiB.", default=None, stored=True)
    cluster: str | None = _setting(
        "Search on a Ray cluster: auto, or its head as HOST:PORT.", default=None, check=checks.cluster
    )
    spill: str | None = _setting(
        "Directory for spilled state and for data that processes exchange.",
        default=None,
        stored=True,
        check=checks.directory,
    )
    strategy: str | Mapping[str, Any] | Sequence[Any] = _setting(
        "auto, any, search, whole, shard, pipeline, pack, sparse, ist, elastic, or several to choose from; "
        "with options: '{name: pipeline, microbatches: 8}'.",
        default="auto",
        stored=True,
    )
    sampler: str | Mapping[str, Any] | optuna.samplers.BaseSampler | None = _setting(
        "tpe, random, cmaes, gp, qmc, grid, nsgaii, auto, a sampler class of Optuna or file.py:Class; with options: "
        "'{name: tpe, multivariate: true}'.",
        default="tpe",
        stored=True,
    )
    pruner: str | Mapping[str, Any] | optuna.pruners.BasePruner | None = _setting(
        "none, median, asha, hyperband, percentile, share, a pruner class of Optuna or file.py:Class; with options: "
        "'{name: median, n_warmup_steps: 3}'.",
        default=None,
        stored=True,
    )
    seed: int | None = _setting(
        "Seed of the study; drawn and recorded when not given.", int, default=None, check=checks.seed
    )
    timeout: float | None = _setting(
        "Seconds after which no trial is started.", float, default=None, check=checks.seconds
    )
    stop_at_timeout: bool = _setting(
        "End running trials at the timeout with the epochs they have.", bool, default=False
    )
    enqueue: Sequence[Mapping[str, Any]] = _setting(
        "Parameters to try first, as with Optuna's enqueue_trial.", None, default=(), check=checks.parameters
    )
    callbacks: Sequence[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]] = _setting(
        "Called with the study and each trial that has ended, as in Optuna.", None, default=(), check=checks.callables
    )
    catch: type[Exception] | tuple[type[Exception], ...] | None = _setting(
        "Errors of user code that the search survives; by default all.", None, default=None, check=checks.errors
    )
    resume: bool = _setting("Continue an existing study.", bool, default=False)
    load_if_exists: bool = _setting("Continue the study if it exists, else start it.", bool, default=False)
    concurrency: int | None = _setting(
        "Trials in flight; default one a device.", int, default=None, stored=True, check=checks.whole
    )
    progress: bool = _setting("Show progress on stderr; the command line has --quiet.", None, default=True)
    keep_weights: int = _setting(
        "Number of best trials whose weights are kept.", int, default=10, stored=True, check=checks.whole
    )
    checkpoint_seconds: float = _setting(
        "Seconds between two checkpoints of a running trial.", float, default=10.0, stored=True, check=checks.seconds
    )
    deadline: float | None = _setting(
        "Seconds without a sign of life until a trial is hung.",
        float,
        default=None,
        stored=True,
        check=checks.seconds,
    )
    database_patience: float = _setting(
        "Seconds to wait for a database that is away.", float, default=300.0, check=checks.seconds
    )
    allow_changes: bool = _setting("Resume with another build or space.", bool, default=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, check = getattr(self, each.name), each.metadata["check"]
            if check is not None and not (value is None and each.default is None):
                check(each.name, value)
        if self.stop_at_timeout and self.timeout is None:
            raise SpecError("stop_at_timeout needs a timeout", "give timeout=seconds too")
        if len(self.metrics) != len(self.directions):
            raise SpecError(
                f"there are {len(self.metrics)} metrics and {len(self.directions)} directions",
                "give a direction for each metric",
            )

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metric of each objective."""
        if self.metric is not None:
            return checks.several("metric", self.metric)
        count = len(self.directions)
        return ("loss",) if count == 1 else tuple(f"value_{i}" for i in range(count))

    @property
    def directions(self) -> tuple[str, ...]:
        """The direction of each objective."""
        return checks.several("direction", self.direction)

    @property
    def endless(self) -> bool:
        """True if only time ends the search."""
        return self.trials >= ENDLESS

    def stored(self) -> dict[str, Any]:
        """Return the settings that are recorded with the study, as plain data."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self) if each.metadata["stored"]}


NAMES = tuple(each.name for each in fields(SearchSettings))
"""The names of all settings."""


def make_settings(**given: Any) -> SearchSettings:
    """Return settings from the arguments of `ht.search`. A study, storage or number of trials of None is filled in."""
    from hydra_tune.coordinator.optuna_arguments import translated  # brings Optuna, which not every command needs

    given = translated(given)
    if given.get("resume") and given.get("study") is None:
        raise SpecError("resume needs the name of a study", "give study='its name'")
    if given.get("trials") is None and not _ends_otherwise(given):
        raise SpecError(
            "the number of trials is missing",
            "give `trials: 20` or --trials 20, a timeout, or callbacks that stop the study",
        )
    if given.get("trials") is not None and given.get("n_trials") is not None:
        raise SpecError(
            "trials and n_trials are both given", "give trials, the study's total, or n_trials, how many to run now"
        )
    filled_in = [name for name in ("study", "storage", "trials") if given.get(name) is None]
    return SearchSettings(**{name: value for name, value in given.items() if name not in filled_in})


def _ends_otherwise(given: Mapping[str, Any]) -> bool:
    """True if a search without a number of trials may end: by time, a callback, or a sampler that stops."""
    if given.get("n_trials") or given.get("timeout") or given.get("callbacks"):
        return True
    sampler = given.get("sampler")
    if isinstance(sampler, str | Mapping):
        name = split("sampler", sampler)[0]
        return name in STOPPING or ":" in name
    kind = type(sampler)
    return sampler is not None and (kind.__name__ in STOPPING or not kind.__module__.startswith("optuna."))


STOPPING = ("grid", "GridSampler", "BruteForceSampler")
"""Samplers that stop a study when nothing is left to propose; one of the user's own may, too."""


def _plain(value: Any) -> Any:
    """Return a value for JSON; for an Optuna sampler or pruner, the name of its class."""
    if isinstance(value, Path):
        return str(value)
    return value if isinstance(value, int | float | list | tuple) else plain(value)
