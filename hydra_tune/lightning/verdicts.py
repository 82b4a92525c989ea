"""How a training under the callback ends before its last epoch: plain data, since every rank has to hear the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import optuna

from hydra_tune.engine.unit import TrialEnded
from hydra_tune.errors import InputError

Kind = Literal["pruned", "diverged", "missing", "stopped", "unusable"]


class MetricMissing(InputError):
    """A monitored metric was never logged."""


class DivergedTrial(TrialEnded, optuna.TrialPruned):
    """A loss or a monitored metric is no longer a finite number.

    A search records it as DIVERGED; Optuna by itself takes it for a pruned trial, so that samplers learn from it.
    """

    status = "DIVERGED"


class Stopped(TrialEnded):
    """The search is being stopped, and the trial has been checkpointed."""

    status = "INTERRUPTED"


class Unusable(TrialEnded):
    """A checkpoint is of another module or Trainer: the attempt is lost, and the next one starts afresh."""

    status = "LOST"


@dataclass(frozen=True)
class Verdict:
    """Why training ends now."""

    kind: Kind
    message: str = ""
    hint: str = ""

    def error(self) -> Exception:
        """The exception that ends the trial so."""
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
