"""Effects of actions on a study: stop it or one of its trials, retry a trial, add trials.

Plain synchronous code that runs on the study's thread; `actions` is the half that runs on the event loop.
"""

from __future__ import annotations

import json
import logging

from optuna.trial import TrialState

from hydra_tune.coordinator.study import OwnedStudy
from hydra_tune.storage.actions import (
    ADD_TRIALS,
    RETRY_TRIAL,
    STOP_STUDY,
    STOP_TRIAL,
    Action,
    answer_action,
    pending_actions,
)
from hydra_tune.storage.database import reading
from hydra_tune.storage.tables import HYDRA_STUDIES

logger = logging.getLogger(__name__)


def read_pending(owned: OwnedStudy) -> list[Action]:
    """Read the unanswered actions."""
    # A separate transaction: the storage's would first flush its queue.
    with reading(owned.storage.engine) as connection:
        return pending_actions(connection, owned.study_id)


def carry_out(owned: OwnedStudy, action: Action, total: int, refusal: str) -> bool:
    """Carry out an action and answer it, in one transaction; return True if it was carried out."""
    if not refusal and action.kind not in _EFFECTS:
        refusal = f"this version of Hydra Tune does not know {action.kind!r}"
    answer, obeyed = (refusal, False) if refusal else _EFFECTS[action.kind](owned, action, total)
    answer_action(owned.storage, action, answer)
    logger.info("%s: %s", action.kind, answer)
    return obeyed


def _stop_study(_: OwnedStudy, __: Action, ___: int) -> tuple[str, bool]:
    return "the search stops; running trials are checkpointed first", True


def _stop_trial(owned: OwnedStudy, action: Action, _: int) -> tuple[str, bool]:
    if action.number is None or not owned.stop_trial(action.number):
        return f"trial {action.number} does not run", False
    return f"trial {action.number} stops after its present unit of work", True


def _retry_trial(owned: OwnedStudy, action: Action, total: int) -> tuple[str, bool]:
    trials = owned.study.get_trials(deepcopy=False)
    found = trials[action.number] if action.number is not None and action.number < len(trials) else None
    if found is None or found.state not in (TrialState.FAIL, TrialState.PRUNED):
        return f"trial {action.number} has not failed", False
    owned.study.enqueue_trial(found.params, user_attrs={"retry_of": found.number})
    _record_total(owned, total)
    return f"trial {found.number} is tried again as trial {len(trials)}", True


def _add_trials(owned: OwnedStudy, _: Action, total: int) -> tuple[str, bool]:
    _record_total(owned, total)
    return f"the study has {total} trials now", True


def _record_total(owned: OwnedStudy, total: int) -> None:
    """Store the total in the study's settings, so that a resumed search ends there."""
    owned.stored["trials"] = total
    owned.storage.update(HYDRA_STUDIES, {"study_id": owned.study_id, "settings": json.dumps(owned.stored)})


_EFFECTS = {
    STOP_STUDY: _stop_study,
    STOP_TRIAL: _stop_trial,
    RETRY_TRIAL: _retry_trial,
    ADD_TRIALS: _add_trials,
}
