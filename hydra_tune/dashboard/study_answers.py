"""Studies as response models."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from hydra_tune.dashboard import answers, charts
from hydra_tune.dashboard.charts import plain
from hydra_tune.dashboard.reader import StudyView
from hydra_tune.storage.columns import UNFINISHED


def study(view: StudyView) -> answers.Study:
    """Return a study at a glance."""
    return answers.Study(**_at_a_glance(view))


def study_detail(view: StudyView) -> answers.StudyDetail:
    """Return a study with its parameters and settings."""
    columns, record, lease = view.columns, view.described, view.lease
    strategies = Counter(word for word in columns.words("strategy") if word)
    runner = None
    if lease is not None and view.running:
        runner = answers.Runner(host=lease.host, pid=lease.pid, since=lease.taken.replace(tzinfo=UTC))
    return answers.StudyDetail(
        **_at_a_glance(view),
        parameters=[parameter(name, columns.distributions[name]) for name in columns.param_names],
        strategies=dict(strategies),
        settings=plain(record.settings) if record else {},
        seed=record.seed if record else None,
        spec=plain(record.spec) if record else None,
        runner=runner,
        device_seconds=float(np.nansum(columns.column("seconds"))),
    )


def parameter(name: str, distribution: BaseDistribution) -> answers.Parameter:
    """Return a parameter with its range."""
    if isinstance(distribution, CategoricalDistribution):
        return answers.Parameter(name=name, kind="categorical", choices=plain(list(distribution.choices)))
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    kind: Literal["float", "int"] = "float" if isinstance(distribution, FloatDistribution) else "int"
    return answers.Parameter(
        name=name, kind=kind, low=distribution.low, high=distribution.high, log=distribution.log
    )  # fmt: skip


def _at_a_glance(view: StudyView) -> dict[str, Any]:
    columns = view.columns
    counts = view.kept("counts", columns.counts)
    finished = sum(count for state, count in counts.items() if state not in UNFINISHED)
    planned = view.described.settings.get("trials") if view.described else None
    best = view.kept("best", lambda: charts.best_trial(columns))
    return {
        "id": columns.study_id,
        "name": columns.name,
        "state": _state(view, finished, planned),
        "metrics": list(view.metrics),
        "directions": ["maximize" if most else "minimize" for most in columns.maximize],
        "counts": counts,
        "trials": columns.size,
        "finished": finished,
        "planned": planned,
        "eta_seconds": _eta(view, finished, planned),
        "best": None if best is None else {
            "number": best, "value": plain(columns.values[best, 0]), "params": plain(columns.params(best)),
        },
        "started": _moment(view, "started", np.fmin),
        "ended": _moment(view, "ended", np.fmax),
        "version": columns.version,
    }  # fmt: skip


def _state(view: StudyView, finished: int, planned: int | None) -> str:
    if view.running:
        return "running"
    if planned is None:
        return "open"
    return "finished" if finished >= planned else "stopped"


def _eta(view: StudyView, finished: int, planned: int | None) -> float | None:
    """Estimate the seconds left at the pace of this run: an earlier one may have had other devices."""
    if not view.running or view.lease is None or planned is None or finished >= planned:
        return None
    since = view.lease.taken.replace(tzinfo=UTC).timestamp()
    in_this_run = int(np.count_nonzero(view.columns.column("ended") >= since))
    if not in_this_run:
        return None
    return (datetime.now(UTC).timestamp() - since) / in_this_run * (planned - finished)


def _moment(view: StudyView, column: str, reduce: Any) -> float | None:
    moments = view.columns.column(column)
    found = float(reduce.reduce(moments)) if len(moments) else math.nan
    return None if math.isnan(found) else found
