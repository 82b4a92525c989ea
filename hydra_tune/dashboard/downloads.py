"""All trials of a study as a CSV or Parquet table."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response

from hydra_tune.core.csv_cells import inert
from hydra_tune.dashboard.reader import StudyView
from hydra_tune.dashboard.routes import Read, StudyId
from hydra_tune.storage.columns import FACTS

router = APIRouter(prefix="/api", tags=["downloads"])


@router.get("/studies/{study_id}/trials.csv", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
def csv(study_id: StudyId, reader: Read) -> Response:
    """Return all trials as CSV."""
    with reader.study(study_id) as view:
        table = trials_table(view)
    text = table.map(inert).rename(columns=inert).to_csv(index=False)
    return _attachment(text.encode(), "text/csv; charset=utf-8", f"study-{study_id}.csv")


@router.get(
    "/studies/{study_id}/trials.parquet",
    response_class=Response,
    responses={200: {"content": {"application/vnd.apache.parquet": {}}}},
)
def parquet(study_id: StudyId, reader: Read) -> Response:
    """Return all trials as a Parquet file."""
    with reader.study(study_id) as view:
        table = trials_table(view)
    file = io.BytesIO()
    table.to_parquet(file, index=False)
    return _attachment(file.getvalue(), "application/vnd.apache.parquet", f"study-{study_id}.parquet")


def trials_table(view: StudyView) -> Any:
    """Return one row for each trial: number, state, values, parameters and measurements."""
    import pandas

    columns = view.columns
    found: dict[str, Any] = {"number": np.arange(columns.size), "state": columns.words("state").astype(str)}
    for index, metric in enumerate(view.metrics):
        found[metric] = columns.values[:, index]
    for name in columns.param_names:
        choices = columns.choices(name)
        internal = columns.param(name)
        if choices is None:
            found[f"params.{name}"] = internal.copy()
        else:
            # As text: the categories of one parameter may be of several types.
            found[f"params.{name}"] = [None if np.isnan(i) else str(choices[int(i)]) for i in internal]
    for name in ("strategy", "device"):
        found[name] = columns.words(name).astype(str)
    for name in ("started", "ended", *FACTS):
        found[name] = columns.column(name).copy()
    found["error"] = [columns.errors.get(number, "") for number in range(columns.size)]
    return pandas.DataFrame(found)


def _attachment(body: bytes, media_type: str, name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
    return Response(body, media_type=media_type, headers=headers)
