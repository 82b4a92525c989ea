"""Carries out requests from viewers of a running study: stop, retry, add trials.

A viewer writes a row (`storage/actions.py`); the coordinator checks for rows about once a second and writes its answer
in the same transaction as the effect, so that a kill at any time leaves no request half done or done twice. Requests
for a study without a coordinator wait until it is resumed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from hydra_tune.coordinator.study_thread import StudyThread
from hydra_tune.core.errors import StorageError
from hydra_tune.storage.actions import ADD_TRIALS, RETRY_TRIAL, STOP_STUDY, Action

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class Obedient(Protocol):
    """The part of a search that actions use, all on the event loop."""

    def stop_on_request(self) -> None:
        """Stop as after Ctrl-C: running trials are checkpointed, and the study can be resumed."""

    def room_for(self, trials: int) -> str:
        """Return the reason why the study cannot have `trials` trials in total; empty if it can."""

    def set_total(self, trials: int) -> None:
        """Set the study's total number of trials."""

    def total(self) -> int:
        """Return the number of trials that the study is to have."""


class Obeying:
    """Checks for actions on one study and carries each out once."""

    def __init__(self, search: Obedient, study: StudyThread) -> None:
        self._search = search
        self._study = study
        self._obeyed: set[int] = set()
        """Ids of obeyed actions whose answer may not be on disk yet."""
        self._looking = asyncio.Lock()

    async def until_cancelled(self) -> None:
        """Check about once a second."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Carry out all pending actions."""
        async with self._looking:
            try:
                waiting = await self._study.pending_actions()
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
        obeyed = await self._study.carry_out(action, total, refusal)
        if obeyed and more:
            self._search.set_total(total)
        if obeyed and action.kind == STOP_STUDY:
            self._search.stop_on_request()
