"""Progress of a trial's training as plain data, and the exception for a loss that is not finite."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_tune.engine.unit import TrialEnded


class Diverged(TrialEnded):
    """The loss is no longer finite; raised before the update, so the weights are those of the previous step."""

    def __init__(self, what: str, value: float, step: int) -> None:
        super().__init__(f"{what} became {value} at step {step}")

    status = "DIVERGED"


@dataclass(frozen=True)
class Progress:
    """The position of a trial after a piece of training."""

    epoch: int
    batch: int
    batches: int
    steps: int
    loss: float
    batches_done: int
    """Batches trained in this piece."""
    seconds: float

    @property
    def epoch_done(self) -> bool:
        return self.batch >= self.batches
