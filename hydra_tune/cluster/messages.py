"""Messages between the coordinator and a node's agent, pickled; their frames are checked before they are unpickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.coordinator.trial_facts import TrialFacts
from hydra_tune.core.devices import Device
from hydra_tune.core.errors import HydraTuneError
from hydra_tune.core.states import Outcome
from hydra_tune.engine.unit import Failure
from hydra_tune.training.remote_trial import TrialInfo
from hydra_tune.training.source import Source


@dataclass(frozen=True)
class Beat:
    """A sign of life, with the time by the sender's clock; the agent's answers one of the coordinator's."""

    sent: float
    answers: float | None = None
    """`sent` of the beat that this one answers."""


# From the coordinator


@dataclass(frozen=True)
class Begin:
    """The search: first message after the versions have been compared."""

    source: Source
    files: dict[str, bytes]
    """The user's modules by path relative to the folder of the source."""
    settings: SearchSettings
    cwd: str
    """The coordinator's current folder; the agent's too, if it exists there."""


@dataclass(frozen=True)
class Attempt:
    """Run this attempt at a trial; checkpoints that it goes on from were sent before."""

    info: TrialInfo
    facts: TrialFacts


@dataclass(frozen=True)
class Answer:
    """The answer to an `Ask`; `failure` is an exception of user code's call, `error` one of the study itself."""

    ask: int
    value: Any = None
    failure: Failure | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Share:
    """The number of trials to run at once on this node, and of those that want its devices now."""

    at_once: int
    rivals: int


@dataclass(frozen=True)
class StopTrials:
    """End these trials as pruned at their next call: they were stopped, or told by another process."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Stopping:
    """Checkpoint and interrupt all trials: the search stops, or the node is drained."""


@dataclass(frozen=True)
class OutOfTime:
    """Running trials are to end with the epochs they have."""


@dataclass(frozen=True)
class Leave:
    """End now."""

    because: str


# From the agent


@dataclass(frozen=True)
class Ready:
    """The agent's devices; the build function has been imported there, unless there is an `error`."""

    devices: tuple[Device, ...] = ()
    host_bytes: int = 0
    """Bytes of host memory for trials."""
    error: HydraTuneError | None = None


@dataclass(frozen=True)
class Ask:
    """A call of the study, for an attempt; `ask` is None if no answer is expected."""

    ask: int | None
    number: int | None
    attempt: str
    name: str
    args: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True)
class Ended:
    """An attempt has ended; its files have been sent before."""

    number: int
    attempt: str
    outcome: Outcome | None
    """None if it was interrupted, after a checkpoint."""
    facts: TrialFacts
    error: Exception | None = None
    """What ended the attempt, if it was neither its own code nor an interruption, such as a full disk."""


# Files, in both directions


@dataclass(frozen=True)
class Piece:
    """Bytes of a file of an attempt: its `weights`, or a file among its `checkpoints`."""

    attempt: str
    kind: str
    name: str
    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Whole:
    """All pieces of an attempt's files were sent: put them in place."""

    attempt: str
    kind: str
    names: tuple[str, ...]
    """Names of all files of this kind; others are removed."""
    sizes: tuple[int, ...]
