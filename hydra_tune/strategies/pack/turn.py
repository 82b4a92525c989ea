"""Results of the units of packed trials: plain data for the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_tune.engine.unit import Failure
from hydra_tune.strategies.epochs import Loaded
from hydra_tune.training.progress import Progress


@dataclass(frozen=True)
class Arrived:
    """A loaded candidate: its signature, or the reason why it cannot be packed."""

    loaded: Loaded
    batch: int
    """Batches of the current epoch that are trained already."""
    signature: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Trained:
    """A member after a turn: its progress, with the metrics of an epoch that has ended, or its error."""

    progress: Progress | None = None
    metrics: dict[str, float] | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Turn:
    """The result of training members together for a while."""

    results: dict[str, Trained]
    """By attempt; empty if they cannot be packed."""
    refused: str = ""
    """Reason why they cannot be packed."""
    fits: int | None = None
    """Members that fit the device's memory, if these do not."""
