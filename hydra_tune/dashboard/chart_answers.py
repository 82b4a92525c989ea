"""Chart data of a study, as response models."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection

from hydra_tune.dashboard import answers, charts
from hydra_tune.dashboard.charts import plain
from hydra_tune.dashboard.importances import importances as compute_importances
from hydra_tune.dashboard.reader import StudyView
from hydra_tune.dashboard.study_answers import parameter
from hydra_tune.storage import details

POINTS = 2_000


def history(view: StudyView, objective: int = 0, points: int = POINTS) -> answers.History:
    """Return the values of completed trials by number, and the best so far."""
    columns = view.columns
    records = charts.records(columns, objective)
    rows = charts.sample(columns, points, keep=records)
    values = columns.values[:, objective]
    return answers.History(
        numbers=rows.tolist(),
        values=_numbers(values[rows]),
        best_numbers=records.tolist(),
        best_values=_numbers(values[records]),
        complete=int(np.count_nonzero(columns.complete)),
    )


def report_curves(connection: Connection, view: StudyView, limit: int) -> list[answers.ReportCurve]:
    """Return intermediate values of the running trials, the best ones, and the last that ended."""
    columns = view.columns
    if not columns.size:
        return []
    running = np.flatnonzero(columns.in_states(["RUNNING"]))
    rows = np.flatnonzero(columns.complete)
    order = np.argsort(columns.values[rows, 0], kind="stable")
    best = rows[order[::-1] if columns.maximize[0] else order]
    latest = np.arange(columns.size)[::-1]
    wanted = dict.fromkeys([*running.tolist(), *best[: limit // 2].tolist(), *latest[:limit].tolist()])
    chosen = list(wanted)[:limit]
    found = details.reports(connection, [int(columns.ids[number]) for number in chosen])
    curves = []
    for number in sorted(chosen):
        points = found.get(int(columns.ids[number]), [])
        if points:
            x, y = [x for x, _ in points], [plain(y) for _, y in points]
            state = columns.word("state", number)
            curves.append(answers.ReportCurve(name=f"trial {number}", number=number, state=state, x=x, y=y))
    return curves


def sample(view: StudyView, limit: int) -> answers.Sample:
    """Return completed trials with all their parameters."""
    columns = view.columns
    rows = charts.sample(columns, limit, keep=charts.records(columns))
    axes = []
    for name in columns.param_names:
        known = parameter(name, columns.distributions[name])
        values = [None if math.isnan(value) else float(value) for value in columns.param(name)[rows]]
        if any(value is not None for value in values):
            axes.append(answers.Axis(name=name, kind=known.kind, log=known.log, choices=known.choices, values=values))
    return answers.Sample(
        numbers=rows.tolist(),
        values=[_numbers(row) for row in columns.values[rows]],
        axes=axes,
        complete=int(np.count_nonzero(columns.complete)),
    )


def pareto(view: StudyView, limit: int = POINTS) -> answers.Pareto:
    """Return the Pareto front and other completed trials."""
    columns = view.columns
    front = charts.best_trials(columns)
    rows = charts.sample(columns, limit, keep=front)
    return answers.Pareto(
        numbers=rows.tolist(), values=[_numbers(row) for row in columns.values[rows]], front=front.tolist()
    )


def failures(view: StudyView) -> list[answers.FailureReason]:
    """Return the reasons for which trials ended without a value."""
    return [answers.FailureReason(**vars(failure)) for failure in charts.failures(view.columns)]


def importances(view: StudyView) -> answers.Importances:
    """Return the importance of each parameter, the most important first."""
    found = compute_importances(view.columns)
    return answers.Importances(
        shares=[answers.Importance(name=name, share=share) for name, share in found.shares.items()],
        trials=found.trials,
        complete=int(np.count_nonzero(view.columns.complete)),
    )


def _numbers(values: NDArray[np.float64]) -> list[answers.Number]:
    return [plain(value) for value in values]
