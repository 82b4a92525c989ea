"""Response models of the JSON API, as documented on the OpenAPI page."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

Number = float | Literal["nan", "inf", "-inf"] | None
"""JSON has no infinity: such numbers are sent as words; null means no number."""


class Best(BaseModel):
    """The best trial so far."""

    number: int
    value: Number
    params: dict[str, Any]


class Parameter(BaseModel):
    """A parameter of the search space, as seen in trials."""

    name: str
    kind: Literal["float", "int", "categorical"]
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: list[Any] | None = None


class Runner(BaseModel):
    """The process that runs a study."""

    host: str
    pid: int
    since: datetime


class Study(BaseModel):
    """A study at a glance."""

    id: int
    name: str
    state: Literal["running", "finished", "stopped", "open"] = Field(
        description="running: a process runs it; finished: all its trials have ended; stopped: some have not "
        "ended, and no process runs it; open: made by plain Optuna, which records no state."
    )
    metrics: list[str]
    directions: list[Literal["minimize", "maximize"]]
    counts: dict[str, int] = Field(description="Number of trials by state.")
    trials: int
    finished: int
    planned: int | None = Field(description="Total number of trials that the study is to have, if known.")
    eta_seconds: float | None = Field(
        description="Seconds until all planned trials have ended, at the pace of this run."
    )
    best: Best | None = Field(description="None with several objectives; see the Pareto front.")
    started: float | None = Field(description="Seconds since 1970.")
    ended: float | None
    version: int = Field(description="Increases with each change of a trial.")


class StudyDetail(Study):
    """A study with its parameters and settings."""

    parameters: list[Parameter]
    strategies: dict[str, int] = Field(description="Number of trials by strategy.")
    settings: dict[str, Any]
    seed: int | None
    spec: dict[str, Any] | None
    runner: Runner | None
    device_seconds: float


class TrialRow(BaseModel):
    """A trial in a list."""

    number: int
    state: str
    values: list[Number]
    params: dict[str, Any]
    strategy: str
    shards: int | None
    seconds: Number
    peak_device_bytes: int | None
    device: str
    started: float | None
    ended: float | None
    error: str


class TrialPage(BaseModel):
    """One page of a study's trials."""

    total: int
    matching: int
    offset: int
    rows: list[TrialRow]
    version: int


class Attempt(BaseModel):
    """One attempt at a trial."""

    attempt: int
    state: str
    started: datetime
    ended: datetime | None
    error: str
    traceback: str


class Checkpoint(BaseModel):
    """A state from which a trial can resume."""

    step: int
    bytes: int
    seconds: float
    made: datetime


class EventRow(BaseModel):
    """An event of a study or trial."""

    number: int | None
    happened: datetime
    kind: str
    message: str


class WorkRow(BaseModel):
    """Totals of a trial's units of one kind on one device."""

    kind: str
    device: str
    shard: int | None
    units: int
    seconds: float
    peak_bytes: int | None
    read_bytes: int
    written_bytes: int


class Curve(BaseModel):
    """A line of a chart."""

    name: str
    x: list[int]
    y: list[Number]


class TrialDetail(TrialRow):
    """Everything about one trial."""

    seed: int | None
    communicated_bytes: int | None
    spill_read_bytes: int | None
    spill_written_bytes: int | None
    spilled_bytes: int | None = Field(description="Peak bytes in the spill store.")
    budget_bytes: int | None = Field(description="Memory of a device in bytes, if recorded.")
    plan: Any = Field(description="The strategy's plan and the reason for the strategy, as recorded.")
    curves: list[Curve]
    reports: Curve
    work: list[WorkRow]
    attempts: list[Attempt]
    checkpoints: list[Checkpoint]
    events: list[EventRow]
    user_attrs: dict[str, Any]
    note: str


class History(BaseModel):
    """Values of completed trials by number, thinned out, and the trials that beat all before them."""

    numbers: list[int]
    values: list[Number]
    best_numbers: list[int]
    best_values: list[Number]
    complete: int


class ReportCurve(Curve):
    """The intermediate values of one trial."""

    number: int
    state: str


class Axis(BaseModel):
    """One parameter of the sampled trials."""

    name: str
    kind: Literal["float", "int", "categorical"]
    log: bool
    choices: list[Any] | None
    values: list[float | None]


class Sample(BaseModel):
    """Completed trials for parallel coordinates and slices: all, or the best and an even selection."""

    numbers: list[int]
    values: list[list[Number]]
    axes: list[Axis]
    complete: int


class Importance(BaseModel):
    """A parameter's share in being among the best trials."""

    name: str
    share: float


class Importances(BaseModel):
    """The importance of each parameter, the most important first."""

    shares: list[Importance]
    trials: int = Field(description="Number of completed trials used.")
    complete: int = Field(description="Number of all completed trials.")


class Pareto(BaseModel):
    """The Pareto front of a study with several objectives, and other completed trials."""

    numbers: list[int]
    values: list[list[Number]]
    front: list[int]


class FailureReason(BaseModel):
    """Trials that ended for one reason."""

    state: str
    reason: str
    count: int
    numbers: list[int] = Field(description="Numbers of some of these trials.")


class DeviceRow(BaseModel):
    """The work of one device."""

    name: str
    seconds: float
    utilisation: float
    budget_bytes: int | None


class Devices(BaseModel):
    """The devices and their utilisation."""

    devices: list[DeviceRow]
    start: float | None
    end: float | None
    units: int
    last_unit: int
    makespan: float
    bound: float
    bound_reason: str
    utilisation: float
    spilled_bytes: int | None = Field(description="Peak bytes in the spill store; null if not recorded.")


class UnitRow(BaseModel):
    """A unit on the time axis; a bin of many units of one trial has no kind."""

    device: str
    number: int
    kind: str
    started: float
    seconds: float
    shard: int | None = None
    steps: int | None = None
    peak_bytes: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None


class DeviceSeries(BaseModel):
    """A device over time, in bins."""

    device: str
    busy: list[float]
    resident_bytes: list[int | None]
    read_bytes: list[int]
    written_bytes: list[int]


class SpillSeries(BaseModel):
    """Bytes in the spill store over time: the maximum of each bin, null before the first record."""

    host_bytes: list[int | None] = Field(description="Bytes in host memory.")
    disk_bytes: list[int | None]


class Timeline(BaseModel):
    """A stretch of time on all devices."""

    start: float
    end: float
    bins: int
    exact: bool = Field(
        description="True if `units` are single units; false if they are the busiest trial of each bin."
    )
    last_unit: int
    units: list[UnitRow]
    series: list[DeviceSeries]
    spilled: SpillSeries


class ActionRow(BaseModel):
    """A request to the process that runs the study, and its answer."""

    action_id: int
    number: int | None
    kind: str
    count: int | None
    asked: datetime
    answered: datetime | None
    answer: str | None


class Server(BaseModel):
    """Facts about this dashboard."""

    version: str
    storage: str = Field(description="The database, without its password.")
    actions: bool
    token: bool
