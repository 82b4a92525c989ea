"""Checks that a resumed study has the same objectives and build function, and reports differences.

A study's values mean nothing under other objectives. Another build function may be intended, but must be confirmed: the
changes are shown, and `allow_changes` accepts them. `study` compares the ranges of parameters, as trials show them.
"""

from __future__ import annotations

from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.core.errors import SpecError
from hydra_tune.storage.queries import StudySummary
from hydra_tune.training.source import Source, difference

ALLOW = "resume with allow_changes (--allow-changes) if that is meant"


def check_objectives(before: StudySummary, settings: SearchSettings) -> None:
    """Raise a SpecError if the objectives differ from those of the study's start."""
    # A study of plain Optuna names no metrics, and one that was begun without metrics may be called by the default.
    unnamed = not before.settings or (settings.metric is None and before.metrics in (settings.metrics, ("value",)))
    was, now = list(before.directions), list(settings.directions)
    if len(before.metrics) == len(was):
        was = [f"{direction} {metric}" for direction, metric in zip(was, before.metrics, strict=True)]
        metrics = before.metrics if unnamed else settings.metrics
        now = [f"{direction} {metric}" for direction, metric in zip(now, metrics, strict=False)]
    if was != now:
        raise SpecError(
            f"study {settings.study!r} was started to {', '.join(was)}, not to {', '.join(now)}",
            "give the same metric and direction, or start another study",
        )


def check_source(before: StudySummary, settings: SearchSettings, source: Source) -> None:
    """Raise a SpecError if the build function has changed, unless `allow_changes` is set."""
    changed = difference(before.source, source.text())
    if changed and not settings.allow_changes:
        raise SpecError(f"what study {settings.study!r} builds has changed: {changed}", ALLOW)
