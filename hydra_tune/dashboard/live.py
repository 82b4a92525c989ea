"""Live updates as server-sent events, each with the changes since the last message.

A stream queries the database once a second while a client listens. Each message has the study at a glance, the trials
that changed, and the id of the newest unit, from which a page fetches what it shows. When a study stops running, `end`
is sent; the stream stays open, as the study may be resumed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from hydra_tune.core.errors import StorageError
from hydra_tune.dashboard import study_answers, trial_answers
from hydra_tune.dashboard.reader import NoSuchStudy, Reader
from hydra_tune.dashboard.routes import LARGEST, Read, StudyId

router = APIRouter(prefix="/api", tags=["live"])

PAUSE_SECONDS = 1.0
SILENCE_SECONDS = 15.0
"""Seconds without news after which a comment is sent, so that both ends notice a dead connection."""
MOST_TRIALS = 200


class Closing:
    """Tells all streams that the server stops, so that none of them delays it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self) -> None:
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Close all streams; may be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def pause(self, seconds: float) -> bool:
        """Wait this long; False if the server stops meanwhile."""
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return True
        return False


@router.get(
    "/studies/{study_id}/live",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def live(
    study_id: StudyId,
    request: Request,
    reader: Read,
    since: Annotated[int, Query(ge=0, le=LARGEST, description="The version of the study that is known already.")] = 0,
) -> StreamingResponse:
    """Stream the changes of a study: events `change` and `end`."""
    # Errors are reported with their status before the stream begins.
    await run_in_threadpool(_news, reader, study_id, since)
    stream = _events(request.app.state.closing, reader, study_id, since)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _events(closing: Closing, reader: Reader, study_id: int, since: int) -> AsyncIterator[str]:
    told: Any = None
    was_running: bool | None = None
    silent = 0.0
    yield "retry: 2000\n\n"
    while True:
        try:
            news = await run_in_threadpool(_news, reader, study_id, since)
        except NoSuchStudy:
            yield _event("gone", {})
            return
        except StorageError as error:
            yield _event("trouble", {"detail": str(error)})
        else:
            since = news["study"]["version"]
            # The remaining time changes by itself, which is not worth a message.
            mark = {**news["study"], "eta_seconds": None}, news["last_unit"]
            if mark != told or news["trials"]:
                yield _event("change", news)
                told, silent = mark, 0.0
            running = news["study"]["state"] == "running"
            if was_running and not running:
                yield _event("end", {"state": news["study"]["state"]})
            was_running = running
        if not await closing.pause(PAUSE_SECONDS):
            return
        silent += PAUSE_SECONDS
        if silent >= SILENCE_SECONDS:
            yield ": still here\n\n"
            silent = 0.0


def _news(reader: Reader, study_id: int, since: int) -> dict[str, Any]:
    with reader.study_and_work(study_id) as (view, _):
        changed = np.flatnonzero(view.columns.changed > since)
        return {
            "study": study_answers.study(view).model_dump(mode="json"),
            # If very many changed, only the newest are sent; a page that lacks others reloads.
            "trials": [trial_answers.trial_row(view, int(n)).model_dump(mode="json") for n in changed[-MOST_TRIALS:]],
            "more": max(0, len(changed) - MOST_TRIALS),
            "last_unit": view.work.last_unit,
        }


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
