"""Reasons for which a training under the callback ends early: plain data, broadcast to every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import optuna

from hydra_tune.core.errors import InputError
from hydra_tune.engine.unit import TrialEnded

Kind = Literal["pruned", "diverged", "missing", "stopped", "unusable"]


class MetricMissing(InputError):
    """A monitored metric was never logged."""


class DivergedTrial(TrialEnded, optuna.TrialPruned):
    """A loss or a monitored metric is no longer a finite number.

    A search records the trial as DIVERGED; plain Optuna records it as pruned, so that samplers learn from it.
    """

    status = "DIVERGED"


class Stopped(TrialEnded):
    """The search is being stopped, and the trial has been checkpointed."""

    status = "INTERRUPTED"


class Unusable(TrialEnded):
    """A checkpoint is of another module or Trainer: the attempt is lost, and the next one starts from scratch."""

    status = "LOST"


@dataclass(frozen=True)
class EndReason:
    """The reason why training ends early."""

    kind: Kind
    message: str = ""
    hint: str = ""

    def error(self) -> Exception:
        """Return the exception that ends the trial."""
        match self.kind:
            case "pruned":
                return optuna.TrialPruned(self.message)
            case "diverged":
                return DivergedTrial(self.message)
            case "missing":
                return MetricMissing(self.message, self.hint)
            case "stopped":
                return Stopped(self.message)
            case "unusable":
                return Unusable(self.message)
