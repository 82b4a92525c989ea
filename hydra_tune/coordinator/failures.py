"""Failures of a search's trials: gives up a search whose every trial fails in the same way."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from typing import TypeAlias

from hydra_tune.core.errors import SearchFailed
from hydra_tune.core.states import Outcome, Status

Errors: TypeAlias = type[Exception] | tuple[type[Exception], ...]

SAME_FAILURES = 5
"""Trials that fail with the same error, with no other outcome before, after which the search gives up."""

SHOWN_REASONS = 3
"""Most different reasons in one message."""


class Failures:
    """The trials that failed in one run of a search."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.outcomes: list[Outcome] = []
        self.gave_up = False
        """True once the search is given up: the mistake is in the search, not in its trials."""
        self._others: list[Outcome] = []
        """Trials that ended in this run other than by failing."""
        self._show = show

    def note(self, outcome: Outcome) -> None:
        """Count a trial's end; give up if every trial fails in the same way."""
        if outcome.status not in (Status.FAILED, Status.LOST, Status.HUNG):
            self._others.append(outcome)
            return
        if not self.outcomes and outcome.traceback:
            self._show(outcome.traceback.rstrip())
        self.outcomes.append(outcome)
        same = all(_alike(failure) == _alike(self.outcomes[0]) for failure in self.outcomes)
        if not self._others and same and len(self.outcomes) >= SAME_FAILURES and not self.gave_up:
            self.gave_up = True
            self._show(f"giving up: {self.why_nothing_completed()}")

    def why_nothing_completed(self) -> str:
        """Return one line for a search that completed nothing."""
        if not self.outcomes:
            return self._why_others() or "all trials were pruned or ran out of time; `trials` shows each one"
        times = f"the first {len(self.outcomes)} trials failed alike" if self.gave_up else "the first failure"
        return f"{times}: {self.outcomes[0].error}"

    def _why_others(self) -> str:
        """Return the first reasons for which trials ended without failing, each once."""
        reasons = {_alike(outcome): outcome for outcome in reversed(self._others) if outcome.error}
        first = list(reasons.values())[::-1][:SHOWN_REASONS]
        return "; ".join(f"{outcome.status.value} ({outcome.error})" for outcome in first)


def uncaught(number: int, outcome: Outcome, catch: Errors | None) -> None:
    """Raise the error of a trial's user code that `catch` does not name; a built-in error keeps its class."""
    if catch is None or outcome.status is not Status.FAILED or not outcome.classes:
        return
    named = {f"{each.__module__}.{each.__qualname__}" for each in (catch if isinstance(catch, tuple) else (catch,))}
    if named & set(outcome.classes):
        return
    module, _, name = outcome.classes[0].rpartition(".")
    known = getattr(builtins, name, None) if module == "builtins" else None
    message = f"trial {number} failed: {outcome.error}"
    if known in (ValueError, TypeError, RuntimeError, KeyError, AttributeError, IndexError, ZeroDivisionError, OSError):
        raise known(message)
    raise SearchFailed(message, "name the error in catch to go on after it; without catch all are survived")


def _alike(outcome: Outcome) -> tuple[Status, str]:
    """Return a failure without its numbers, since process ids and devices differ for the same reason."""
    return outcome.status, re.sub(r"\d+", "#", outcome.error)
