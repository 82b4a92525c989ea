"""Obeys what somebody who looks at a running study asks for: stop, retry, add trials.

Whoever asks writes a row (`storage/actions.py`); the coordinator looks for rows about once a second and writes its
answer in the transaction that has the effect, so that nothing is done twice or half, whatever is killed when. What is
asked while nobody runs the study waits until it is resumed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Protocol

from optuna.trial import TrialState

from hydra_tune.errors import StorageError
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
from hydra_tune.study import OwnedStudy
from hydra_tune.study_thread import StudyThread

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
STOPPED = "stopped on request"
"""What the record of a trial says that somebody stopped."""


class Obedient(Protocol):
    """A search, as far as actions concern it; all of it on the event loop."""

    def stop_on_request(self) -> None:
        """End as after Ctrl-C: running trials are checkpointed, and the study can be resumed."""

    def room_for(self, trials: int) -> str:
        """Why the study cannot have so many trials in total; empty where it can."""

    def set_total(self, trials: int) -> None:
        """The study has so many trials from now on."""

    def total(self) -> int:
        """How many trials the study is to have."""


class Obeying:
    """Looks for actions on one study and obeys them, each once."""

    def __init__(self, search: Obedient, study: StudyThread) -> None:
        self._search = search
        self._study = study
        self._obeyed: set[int] = set()
        """Those whose answer may not be on disk yet."""
        self._looking = asyncio.Lock()

    async def until_cancelled(self) -> None:
        """Look about once a second."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Obey what has been asked so far."""
        async with self._looking:
            try:
                waiting: list[Action] = await self._study.call(_pending, self._study.study)
            except StorageError as error:
                logger.warning("actions could not be read: %s", error)
                return
            for action in waiting:
                if action.action_id not in self._obeyed:
                    self._obeyed.add(action.action_id)
                    await self._obey(action)

    async def _obey(self, action: Action) -> None:
        more = {ADD_TRIALS: action.count or 0, RETRY_TRIAL: 1}.get(action.kind, 0)
        total = self._search.total() + more
        refusal = self._search.room_for(total) if more else ""
        obeyed = await self._study.call(_carry_out, self._study.study, action, total, refusal)
        if obeyed and more:
            self._search.set_total(total)
        if obeyed and action.kind == STOP_STUDY:
            self._search.stop_on_request()


# What follows runs on the study's thread.


def _pending(owned: OwnedStudy) -> list[Action]:
    # A transaction of its own: the storage's would first write all that has gathered.
    with reading(owned.storage.engine) as connection:
        return pending_actions(connection, owned.study_id)


def _carry_out(owned: OwnedStudy, action: Action, total: int, refusal: str) -> bool:
    """Do what was asked and answer; both are written in one transaction. Whether it was done."""
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
    """With the study's settings, so that a resumed search ends at the new total."""
    owned.stored["trials"] = total
    owned.storage.update(HYDRA_STUDIES, {"study_id": owned.study_id, "settings": json.dumps(owned.stored)})


_EFFECTS = {
    STOP_STUDY: _stop_study,
    STOP_TRIAL: _stop_trial,
    RETRY_TRIAL: _retry_trial,
    ADD_TRIALS: _add_trials,
}
