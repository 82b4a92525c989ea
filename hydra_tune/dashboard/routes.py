"""The GET routes of the JSON API, which only read."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request

from hydra_tune.dashboard import answers, chart_answers, device_answers, study_answers, trial_answers
from hydra_tune.dashboard.reader import Reader
from hydra_tune.storage import details

router = APIRouter(prefix="/api", tags=["studies"])

LARGEST = 2**31 - 1
"""Ids are 32-bit integers in PostgreSQL."""
MOMENT = 1e11
StudyId = Annotated[int, Path(ge=1, le=LARGEST, description="The study's id, from the list of studies.")]
TrialNumber = Annotated[int, Path(ge=0, le=LARGEST)]
Moment = Annotated[float | None, Query(ge=0, le=MOMENT, allow_inf_nan=False, description="Seconds since 1970.")]


def reader_of(request: Request) -> Reader:
    """Return the application's reader."""
    reader: Reader = request.app.state.reader
    return reader


Read = Annotated[Reader, Depends(reader_of)]


@router.get("/server", tags=["server"])
def server(request: Request) -> answers.Server:
    """Return facts about this dashboard."""
    found: answers.Server = request.app.state.server
    return found


@router.get("/studies")
def studies(reader: Read) -> list[answers.Study]:
    """Return all studies, newest first."""
    found = []
    for study_id in reversed(reader.study_ids()):
        with reader.study(study_id) as view:
            found.append(study_answers.study(view))
    return found


@router.get("/studies/{study_id}")
def study(study_id: StudyId, reader: Read) -> answers.StudyDetail:
    """Return a study with its parameters and settings."""
    with reader.study(study_id) as view:
        return study_answers.study_detail(view)


@router.get("/studies/{study_id}/trials")
def trials(
    study_id: StudyId,
    reader: Read,
    offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 50,
    sort: Annotated[
        str | None,
        Query(
            max_length=600, description="Column to sort by: a parameter, a metric, number, state, seconds, memory, …"
        ),
    ] = None,
    descending: bool | None = None,
    filter: Annotated[
        str,
        Query(
            max_length=1_000,
            description="Terms such as `state:failed`, `lr<0.01`, `activation=relu`, or words of an error.",
        ),
    ] = "",
) -> answers.TrialPage:
    """Return a page of trials, filtered and sorted; by default the best first."""
    with reader.study(study_id) as view:
        return trial_answers.trial_page(view, offset=offset, limit=limit, sort=sort, down=descending, text=filter)


@router.get("/studies/{study_id}/trials/{number}")
def trial(study_id: StudyId, number: TrialNumber, reader: Read) -> answers.TrialDetail:
    """Return everything about one trial."""
    with reader.study(study_id) as view, reader.connection() as connection:
        view.check_trial(number)
        return trial_answers.trial_detail(connection, view, number, reader.storage.has_hydra_tables)


@router.get("/studies/{study_id}/history", tags=["charts"])
def history(
    study_id: StudyId, reader: Read, objective: Annotated[int, Query(ge=0, le=99)] = 0
) -> answers.History:  # fmt: skip
    """Return values by trial, and the best so far."""
    with reader.study(study_id) as view:
        chosen = min(objective, len(view.columns.maximize) - 1)
        return view.kept(("history", chosen), lambda: chart_answers.history(view, chosen))


@router.get("/studies/{study_id}/reports", tags=["charts"])
def reports(
    study_id: StudyId, reader: Read, limit: Annotated[int, Query(ge=1, le=200)] = 40
) -> list[answers.ReportCurve]:
    """Return intermediate values of the running, the best and the latest trials."""
    with reader.study(study_id) as view, reader.connection() as connection:
        return chart_answers.report_curves(connection, view, limit)


@router.get("/studies/{study_id}/sample", tags=["charts"])
def sample(study_id: StudyId, reader: Read, limit: Annotated[int, Query(ge=10, le=5_000)] = 800) -> answers.Sample:
    """Return completed trials with their parameters, for parallel coordinates and slices."""
    with reader.study(study_id) as view:
        return view.kept(("sample", limit), lambda: chart_answers.sample(view, limit))


@router.get("/studies/{study_id}/importances", tags=["charts"])
def importances(study_id: StudyId, reader: Read) -> answers.Importances:
    """Return the importance of each parameter for being among the best tenth (PED-ANOVA)."""
    with reader.study(study_id) as view:
        return view.kept("importances", lambda: chart_answers.importances(view))


@router.get("/studies/{study_id}/pareto", tags=["charts"])
def pareto(study_id: StudyId, reader: Read) -> answers.Pareto:
    """Return the Pareto front of a study with several objectives."""
    with reader.study(study_id) as view:
        return view.kept("pareto", lambda: chart_answers.pareto(view))


@router.get("/studies/{study_id}/failures", tags=["charts"])
def failures(study_id: StudyId, reader: Read) -> list[answers.FailureReason]:
    """Return the reasons for which trials ended without a value."""
    with reader.study(study_id) as view:
        return view.kept("failures", lambda: chart_answers.failures(view))


@router.get("/studies/{study_id}/devices", tags=["devices"])
def devices(study_id: StudyId, reader: Read) -> answers.Devices:
    """Return the devices, their utilisation, and the makespan with its lower bound."""
    with reader.study_and_work(study_id) as (view, _):
        return view.kept("devices", lambda: device_answers.devices(view), version=view.worked)


@router.get("/studies/{study_id}/timeline", tags=["devices"])
def timeline(
    study_id: StudyId,
    reader: Read,
    start: Moment = None,
    end: Moment = None,
    bins: Annotated[int, Query(ge=1, le=2_000)] = 300,
) -> answers.Timeline:
    """Return the units in a stretch of time, or bins if there are too many, and each device over time."""
    with reader.study_and_work(study_id) as (view, connection):
        compute = partial(device_answers.timeline, connection, view, start, end, bins)
        if start is not None or end is not None:
            return compute()
        return view.kept(("timeline", bins), compute, version=view.worked)


@router.get("/studies/{study_id}/units", tags=["devices"])
def units(
    study_id: StudyId, reader: Read, after: Annotated[int, Query(ge=0, le=LARGEST)]
) -> list[answers.UnitRow] | None:
    """Return units newer than unit `after`, for a growing timeline; null if they are too many."""
    with reader.study_and_work(study_id) as (view, connection):
        return device_answers.new_units(connection, view, after) if view.work.units else []


@router.get("/studies/{study_id}/events")
def events(
    study_id: StudyId, reader: Read, limit: Annotated[int, Query(ge=1, le=1_000)] = 100
) -> list[answers.EventRow]:
    """Return the events of the study, newest first."""
    with reader.study(study_id), reader.connection() as connection:
        if not reader.storage.has_hydra_tables:
            return []
        return [trial_answers.event_row(event) for event in details.events(connection, study_id, None, limit)]
