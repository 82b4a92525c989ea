"""What must be as it was when a study is resumed, and what is said where it is not.

A study's values mean nothing under other objectives. Another build function may be meant, but must be said to be: what
changed is shown, and `allow_changes` goes on with it. The ranges of parameters are compared as trials show them, in
`study`.
"""

from __future__ import annotations

from hydra_tune.errors import SpecError
from hydra_tune.settings import SearchSettings
from hydra_tune.source import Source, difference
from hydra_tune.storage.queries import StudySummary

ALLOW = "resume with allow_changes (--allow-changes) if that is meant"


def check_objectives(before: StudySummary, settings: SearchSettings) -> None:
    """Refuse to go on with other objectives than those the study was started with."""
    was = [f"{direction} {metric}" for direction, metric in zip(before.directions, before.metrics, strict=True)]
    now = [f"{d} {m}" for d, m in zip(settings.directions, settings.metrics, strict=True)]
    if before.settings and was != now:
        raise SpecError(
            f"study {settings.study!r} was started to {', '.join(was)}, not to {', '.join(now)}",
            "give the same metric and direction, or start another study",
        )


def check_source(before: StudySummary, settings: SearchSettings, source: Source) -> None:
    """Refuse to go on with another build function, unless that is meant."""
    changed = difference(before.source, source.text())
    if changed and not settings.allow_changes:
        raise SpecError(f"what study {settings.study!r} builds has changed: {changed}", ALLOW)
