"""Requests from a viewer of a study to its coordinator, and notes on trials.

The dashboard writes a row; the study's coordinator reads it within about a second and answers in the same transaction
as the effect. A request for a study without a coordinator waits until the study is resumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select

from hydra_tune.storage.database import writing
from hydra_tune.storage.queued_database import QueuedDatabase
from hydra_tune.storage.tables import HYDRA_ACTIONS, HYDRA_NOTES, utc_now

STOP_STUDY, STOP_TRIAL, RETRY_TRIAL, ADD_TRIALS = KINDS = ("stop-study", "stop-trial", "retry-trial", "add-trials")
LONGEST_NOTE = 10_000


@dataclass(frozen=True)
class Action:
    """A request to a study's coordinator; `answered` is None until the request is carried out or refused."""

    action_id: int
    study_id: int
    number: int | None
    kind: str
    count: int | None
    asked: datetime
    answered: datetime | None
    answer: str | None


def ask(
    storage: QueuedDatabase, study_id: int, kind: str, *, number: int | None = None, count: int | None = None
) -> int:
    """Write a request for the study's coordinator and return the action's id."""
    row = {"study_id": study_id, "number": number, "kind": kind, "count": count, "asked": utc_now()}
    with writing(storage.engine) as connection:
        key = connection.execute(insert(HYDRA_ACTIONS).values(**row)).inserted_primary_key
    assert key is not None
    return int(key[0])


def pending_actions(connection: Connection, study_id: int) -> list[Action]:
    """Return the unanswered actions, oldest first."""
    waiting = select(HYDRA_ACTIONS).where(HYDRA_ACTIONS.c.study_id == study_id, HYDRA_ACTIONS.c.answered.is_(None))
    return [Action(**row._mapping) for row in connection.execute(waiting.order_by(HYDRA_ACTIONS.c.action_id))]


def recent_actions(connection: Connection, study_id: int, limit: int = 20) -> list[Action]:
    """Return the latest actions, newest first."""
    asked = select(HYDRA_ACTIONS).where(HYDRA_ACTIONS.c.study_id == study_id)
    rows = connection.execute(asked.order_by(HYDRA_ACTIONS.c.action_id.desc()).limit(limit))
    return [Action(**row._mapping) for row in rows]


def answer_action(storage: QueuedDatabase, action: Action, answer: str) -> None:
    """Record the answer to an action, in the same transaction as its effect."""
    row = {"action_id": action.action_id, "answered": utc_now(), "answer": answer}
    storage.update(HYDRA_ACTIONS, row)


def write_note(storage: QueuedDatabase, study_id: int, number: int, text: str) -> None:
    """Replace the note on a trial; an empty text removes the note."""
    with writing(storage.engine) as connection:
        mine = (HYDRA_NOTES.c.study_id == study_id) & (HYDRA_NOTES.c.number == number)
        connection.execute(delete(HYDRA_NOTES).where(mine))
        if text:
            row = {"study_id": study_id, "number": number, "text": text, "changed": utc_now()}
            connection.execute(insert(HYDRA_NOTES).values(**row))


def read_note(connection: Connection, study_id: int, number: int) -> str:
    """Return the note on a trial, or an empty string."""
    query = select(HYDRA_NOTES.c.text).where(HYDRA_NOTES.c.study_id == study_id, HYDRA_NOTES.c.number == number)
    return connection.execute(query).scalar() or ""
