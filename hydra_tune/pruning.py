"""Asynchronous successive halving by the share of its training that a trial has behind it.

Trials of a fit are given different numbers of epochs, by their speed, and each lowers its learning rate towards its own
end. After equal numbers of epochs they are not comparable; after equal shares they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from optuna.pruners import BasePruner
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

RUNGS = (1 / 8, 1 / 4, 1 / 2)
KEPT = 3
"""One in so many passes a rung, and so many pass at first."""
EPOCHS, NEVER = "epochs", "never_pruned"
"""Attributes of a trial: of how many epochs its training is; whether it is exempt."""


class SharePruner(BasePruner):
    """Prunes a trial at a rung where it is not among the best third of those that got there."""

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
    """Whether a value, less being better, is among the best that may go on."""
    better = sum(other < own for other in others)
    return better < max(KEPT, (len(others) + 1) // KEPT)


def steps_at(rung: float, epochs: int) -> int:
    """How many epochs that share of a training is, at least one."""
    return max(1, round(rung * epochs))


def best_until(values: Mapping[int, float], steps: int, sign: float) -> float | None:
    """The best of a trial's first epochs, less being better; None where it has not got so far."""
    if not values or max(values) + 1 < steps:
        return None
    return min(sign * value for step, value in values.items() if step < steps)
