"""Makes a study so that a process that is killed meanwhile leaves nothing in the way.

A study takes several transactions to make. The first one marks it with the process that makes it, and the last one,
its description, removes the mark. A study whose maker is dead has no trials, and the next search of that name makes it
anew.
"""

from __future__ import annotations

from typing import Any

import optuna
from optuna.study import StudyDirection

from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.core.errors import SpecError
from hydra_tune.storage import HydraStorage
from hydra_tune.storage.leases import process_runs, this_host, this_process
from hydra_tune.storage.queries import StudySummary, study_summary

_MAKING = "making"
"""Key of the mark in the recorded settings: the host, id and start of the process that makes the study."""


def forget_unfinished(storage: HydraStorage, name: str) -> bool:
    """Delete a study that was not made to its end; return True if there was one.

    Raises a SpecError if it is being made.
    """
    if name not in optuna.get_all_study_names(storage) or not is_unfinished(summary := study_summary(storage, name)):
        return False
    maker = summary.settings[_MAKING]
    if maker["host"] != this_host() or process_runs(maker["pid"], maker["process_started"]):
        raise SpecError(
            f"study {name!r} is being made by process {maker['pid']} on {maker['host']}", "wait, or use another name"
        )
    storage.delete_study(summary.study_id)
    return True


def make_study(settings: SearchSettings, storage: HydraStorage, **parts: Any) -> None:
    """Create a study that is marked as being made; its first description removes the mark."""
    directions = [StudyDirection[direction.upper()] for direction in settings.directions]
    with storage.describing_new_studies(list(settings.metrics), {_MAKING: this_process()}):
        optuna.create_study(study_name=settings.study, directions=directions, storage=storage, **parts)


def is_unfinished(summary: StudySummary) -> bool:
    """True if the process that makes the study has not described it, and perhaps was killed."""
    return _MAKING in summary.settings
