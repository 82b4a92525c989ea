"""Asynchronous successive halving by the completed share of a trial's training.

Trials of a fit have different numbers of epochs, by their speed, and each lowers its learning rate towards its own end.
They are comparable after equal shares of their training, not after equal numbers of epochs.
"""

from __future__ import annotations

from collections.abc import Mapping

from optuna.pruners import BasePruner
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

RUNGS = (1 / 8, 1 / 4, 1 / 2)
KEPT = 3
"""One in this many trials passes a rung; the first this many always pass."""
EPOCHS, NEVER = "epochs", "never_pruned"
"""Attributes of a trial: its total number of epochs, and its exemption from pruning."""


class SharePruner(BasePruner):
    """Prunes a trial at a rung unless it is among the best third of the trials there."""

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        epochs, last = trial.user_attrs.get(EPOCHS), trial.last_step
        if not epochs or last is None or trial.user_attrs.get(NEVER):
            return False
        rung = next((rung for rung in RUNGS if last + 1 == steps_at(rung, epochs)), None)
        if rung is None:
            return False
        sign = -1.0 if study.direction is StudyDirection.MAXIMIZE else 1.0
        others = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING))
        there = [
            best_until(other.intermediate_values, steps_at(rung, other.user_attrs[EPOCHS]), sign)
            for other in others
            if other.number != trial.number and other.user_attrs.get(EPOCHS)
        ]
        own = best_until(trial.intermediate_values, last + 1, sign)
        return own is not None and not passes(own, [value for value in there if value is not None])


def passes(own: float, others: list[float]) -> bool:
    """True if a value (smaller is better) is among the best, which may continue."""
    better = sum(other < own for other in others)
    return better < max(KEPT, (len(others) + 1) // KEPT)


def steps_at(rung: float, epochs: int) -> int:
    """Return the number of epochs in that share of a training, at least one."""
    return max(1, round(rung * epochs))


def best_until(values: Mapping[int, float], steps: int, sign: float) -> float | None:
    """Return the best value of a trial's first `steps` epochs (smaller is better); None if it has fewer."""
    if not values or max(values) + 1 < steps:
        return None
    return min(sign * value for step, value in values.items() if step < steps)
