"""The trials whose weights stay on disk: the best of a study with one objective."""

from __future__ import annotations

from collections.abc import Iterable

from optuna.trial import FrozenTrial, TrialState

from hydra_tune.core.states import Outcome, Status


class KeptWeights:
    """Ranks completed trials by value."""

    def __init__(self, keep: int, directions: tuple[str, ...], earlier: Iterable[FrozenTrial]) -> None:
        """`earlier` trials of the study have their weights on disk already."""
        self._keep = keep
        self._sign = -1.0 if directions[0] == "maximize" else 1.0
        self._several = len(directions) > 1
        self._ranks: dict[int, float] = {}
        for trial in earlier:
            if trial.state is TrialState.COMPLETE and not self._several and trial.value is not None:
                self._ranks[trial.number] = self._sign * trial.value

    def add(self, number: int, outcome: Outcome) -> list[int]:
        """Rank a trial that has ended; return the trials whose weights are no longer among the best."""
        if outcome.status is not Status.COMPLETE or outcome.values is None or self._several:
            return []
        self._ranks[number] = self._sign * outcome.values[0]
        surplus = sorted(self._ranks, key=lambda each: (self._ranks[each], each))[self._keep :]
        for old in surplus:
            del self._ranks[old]
        return surplus
