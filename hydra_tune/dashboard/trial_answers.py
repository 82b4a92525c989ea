"""Trials as response models: rows of a list, and one in full."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection

from hydra_tune.dashboard import answers
from hydra_tune.dashboard.charts import plain
from hydra_tune.dashboard.filters import matching, ordered
from hydra_tune.dashboard.reader import StudyView
from hydra_tune.storage import details
from hydra_tune.storage.actions import read_note

MOVED = ("communicated_bytes", "spill_read_bytes", "spill_written_bytes")


def trial_row(view: StudyView, number: int) -> answers.TrialRow:
    """Return a trial as a row of a list."""
    return answers.TrialRow(**_row(view, number))


def trial_page(
    view: StudyView, *, offset: int, limit: int, sort: str | None, down: bool | None, text: str
) -> answers.TrialPage:
    """Return a page of trials; by default the best first, and with several objectives the newest first."""
    columns = view.columns
    rows = np.flatnonzero(matching(columns, view.metrics, text))
    if sort is None and len(columns.maximize) == 1:
        rows = _best_first(view, rows)
    else:
        rows = ordered(columns, view.metrics, rows, sort or "number", sort is None if down is None else down)
    return answers.TrialPage(
        total=columns.size,
        matching=len(rows),
        offset=offset,
        rows=[trial_row(view, int(number)) for number in rows[offset : offset + limit]],
        version=columns.version,
    )


def _best_first(view: StudyView, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Sort completed trials by value, then the others: a pruned trial's last report is no result."""
    columns = view.columns
    done = columns.complete[rows]
    best = ordered(columns, view.metrics, rows[done], "value", columns.maximize[0])
    return np.concatenate([best, rows[~done]])


def trial_detail(connection: Connection, view: StudyView, number: int, ours: bool) -> answers.TrialDetail:
    """Return everything about one trial; `ours` is True if Hydra Tune's own tables exist."""
    columns = view.columns
    trial_id = int(columns.ids[number])
    reports = details.reports(connection, [trial_id]).get(trial_id, [])
    found: dict[str, Any] = {
        "seed": None, "plan": None, "spilled_bytes": None, "curves": [], "work": [], "attempts": [], "checkpoints": [],
        "events": [], "note": "",
    }  # fmt: skip
    if ours:
        found |= _our_records(connection, columns.study_id, number)
    found |= {name: _fact(view, name, number) for name in MOVED}
    return answers.TrialDetail(
        **_row(view, number),
        budget_bytes=view.pool.get(columns.word("device", number)) or min(view.pool.values(), default=None),
        reports=curve("reports", reports),
        user_attrs=plain(details.user_attrs(connection, trial_id)),
        **found,
    )


def curve(name: str, points: list[tuple[int, float]]) -> answers.Curve:
    """Return a line of a chart."""
    return answers.Curve(name=name, x=[x for x, _ in points], y=[plain(y) for _, y in points])


def event_row(event: details.Event) -> answers.EventRow:
    return answers.EventRow(
        number=event.number, happened=_utc(event.happened), kind=event.kind, message=event.message
    )  # fmt: skip


def _row(view: StudyView, number: int) -> dict[str, Any]:
    columns = view.columns
    return {
        "number": number,
        "state": columns.word("state", number),
        "values": [None if math.isnan(value) else plain(value) for value in columns.values[number]],
        "params": plain(columns.params(number)),
        "strategy": columns.word("strategy", number),
        "shards": _fact(view, "shards", number),
        "seconds": _float(view, "seconds", number),
        "peak_device_bytes": _fact(view, "peak_device_bytes", number),
        "device": columns.word("device", number),
        "started": _float(view, "started", number),
        "ended": _float(view, "ended", number),
        "error": columns.errors.get(number, ""),
    }


def _our_records(connection: Connection, study_id: int, number: int) -> dict[str, Any]:
    row = details.trial_row(connection, study_id, number)
    curves = details.curves(connection, study_id, number)
    return {
        "seed": row.seed if row else None,
        "spilled_bytes": row.spilled_bytes if row else None,
        "plan": plain(json.loads(row.plan)) if row and row.plan else None,
        "curves": [curve(name, points) for name, points in curves.items()],
        "work": [answers.WorkRow(**vars(kind)) for kind in details.work(connection, study_id, number)],
        "attempts": [
            answers.Attempt(
                attempt=attempt.attempt, state=attempt.state, started=_utc(attempt.started),
                ended=attempt.ended and _utc(attempt.ended), error=attempt.error or "",
                traceback=attempt.traceback or "",
            )
            for attempt in details.attempts(connection, study_id, number)
        ],
        "checkpoints": [
            answers.Checkpoint(step=point.step, bytes=point.bytes, seconds=point.seconds, made=_utc(point.made))
            for point in details.checkpoints(connection, study_id, number)
        ],
        "events": [event_row(event) for event in details.events(connection, study_id, number)],
        "note": read_note(connection, study_id, number),
    }  # fmt: skip


def _fact(view: StudyView, name: str, number: int) -> int | None:
    value = float(view.columns.column(name)[number])
    return None if math.isnan(value) else int(value)


def _float(view: StudyView, name: str, number: int) -> float | None:
    value = float(view.columns.column(name)[number])
    return None if math.isnan(value) else value


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC)
