"""The routes that change something; they exist only with `--allow-actions`.

They do not change trials themselves: they record a request, which the process that runs the study carries out.
"""

from __future__ import annotations

from datetime import UTC
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, Field

from hydra_tune.dashboard import answers
from hydra_tune.dashboard.reader import StudyView
from hydra_tune.dashboard.routes import LARGEST, Read, StudyId, TrialNumber
from hydra_tune.storage import HydraStorage
from hydra_tune.storage.actions import (
    ADD_TRIALS,
    LONGEST_NOTE,
    RETRY_TRIAL,
    STOP_TRIAL,
    Action,
    ask,
    recent_actions,
    write_note,
)

router = APIRouter(prefix="/api", tags=["actions"])


class ActionRequest(BaseModel):
    """A request to the process that runs the study."""

    kind: Literal["stop-study", "stop-trial", "retry-trial", "add-trials"]
    number: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    count: Annotated[int, Field(ge=1, le=100_000)] | None = None


class Note(BaseModel):
    """Text on a trial; empty text removes it."""

    text: Annotated[str, Field(max_length=LONGEST_NOTE)]


@router.post("/studies/{study_id}/actions", status_code=202)
def act(study_id: StudyId, requested: ActionRequest, request: Request, reader: Read) -> answers.ActionRow:
    """Record a request; the answer of the process that runs the study appears later in the list of actions."""
    with reader.study(study_id) as view:
        _check(view, requested)
    storage: HydraStorage = request.app.state.writable
    action_id = ask(storage, study_id, requested.kind, number=requested.number, count=requested.count)
    return next(action for action in actions(study_id, reader) if action.action_id == action_id)


@router.get("/studies/{study_id}/actions")
def actions(study_id: StudyId, reader: Read) -> list[answers.ActionRow]:
    """Return the latest requests, newest first, with the answers so far."""
    with reader.study(study_id), reader.connection() as connection:
        if not reader.storage.has_hydra_tables:
            return []
        return [_row(action) for action in recent_actions(connection, study_id)]


@router.put("/studies/{study_id}/trials/{number}/note", status_code=204)
def note(study_id: StudyId, number: TrialNumber, written: Note, request: Request, reader: Read) -> None:
    """Write a note on a trial."""
    with reader.study(study_id) as view:
        view.check_trial(number)
    if "\0" in written.text:
        raise HTTPException(422, "a note is text; this one holds a NUL")
    write_note(request.app.state.writable, study_id, number, written.text)


def _check(view: StudyView, requested: ActionRequest) -> None:
    if view.described is None:
        raise HTTPException(409, "plain Optuna made this study; nothing here can run it")
    if (requested.kind == ADD_TRIALS) != (requested.count is not None):
        raise HTTPException(422, "`count` goes with add-trials")
    if (requested.kind in (STOP_TRIAL, RETRY_TRIAL)) != (requested.number is not None):
        raise HTTPException(422, "`number` goes with stop-trial and retry-trial")
    if requested.number is None:
        return
    state = view.columns.word("state", view.check_trial(requested.number))
    if requested.kind == STOP_TRIAL and state != "RUNNING":
        raise HTTPException(409, f"trial {requested.number} is {state}; only a running one can be stopped")
    if requested.kind == RETRY_TRIAL and state in ("RUNNING", "WAITING", "COMPLETE"):
        raise HTTPException(409, f"trial {requested.number} is {state}; only one that failed can be retried")


def _row(action: Action) -> answers.ActionRow:
    facts = {name: value for name, value in vars(action).items() if name != "study_id"}
    for name in ("asked", "answered"):
        facts[name] = facts[name] and facts[name].replace(tzinfo=UTC)
    return answers.ActionRow(**facts)
