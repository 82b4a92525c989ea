"""Table definitions: short names for Optuna's tables, and our own tables with the prefix `hydra_`.

Optuna defines its own tables. Ours are defined twice on purpose: here in their current form, and in `migrations` as the
steps to this form. A test checks that the two agree.
"""

from __future__ import annotations

from datetime import UTC, datetime

from optuna.storages._rdb import models
from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

STUDIES: Table = models.StudyModel.__table__
STUDY_DIRECTIONS: Table = models.StudyDirectionModel.__table__
STUDY_USER_ATTRS: Table = models.StudyUserAttributeModel.__table__
STUDY_SYSTEM_ATTRS: Table = models.StudySystemAttributeModel.__table__
TRIALS: Table = models.TrialModel.__table__
TRIAL_PARAMS: Table = models.TrialParamModel.__table__
TRIAL_VALUES: Table = models.TrialValueModel.__table__
TRIAL_REPORTS: Table = models.TrialIntermediateValueModel.__table__
TRIAL_USER_ATTRS: Table = models.TrialUserAttributeModel.__table__
TRIAL_SYSTEM_ATTRS: Table = models.TrialSystemAttributeModel.__table__
TRIAL_HEARTBEATS: Table = models.TrialHeartbeatModel.__table__

# Optuna's tables that refer to a trial and to a study, in the order in which rows must be deleted.
OF_TRIALS = (
    TRIAL_PARAMS,
    TRIAL_VALUES,
    TRIAL_REPORTS,
    TRIAL_USER_ATTRS,
    TRIAL_SYSTEM_ATTRS,
    TRIAL_HEARTBEATS,
)
OF_STUDIES = (TRIALS, STUDY_DIRECTIONS, STUDY_USER_ATTRS, STUDY_SYSTEM_ATTRS)

# Optuna indexes names, and PostgreSQL enforces their length.
LONGEST_NAME: int = models.MAX_INDEXED_STRING_LENGTH

METADATA = MetaData()


def utc_now() -> datetime:
    """Return the current time in stored form: UTC without a zone, like Optuna, since SQLite keeps no zones."""
    return datetime.now(UTC).replace(tzinfo=None)


def _study_column(*, primary_key: bool = False) -> Column[int]:
    return Column(
        "study_id",
        Integer,
        ForeignKey(STUDIES.c.study_id, ondelete="CASCADE"),
        primary_key=primary_key,
        nullable=False,
        autoincrement=False,
    )


HYDRA_STUDIES = Table(
    "hydra_studies",
    METADATA,
    _study_column(primary_key=True),
    Column("seed", BigInteger),
    Column("metrics", Text, nullable=False),
    Column("settings", Text, nullable=False),
    Column("spec", Text),
    # A Python default rather than a value in the row, so that describing a study again keeps its creation date.
    Column("created", DateTime, nullable=False, default=utc_now),
    Column("version", String(64), nullable=False),
    Column("source", Text),
)

HYDRA_TRIALS = Table(
    "hydra_trials",
    METADATA,
    _study_column(primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("seed", BigInteger),
    Column("strategy", String(64)),
    Column("shards", Integer),
    Column("status", String(32)),
    Column("device", String(256)),
    Column("seconds", Float(53)),
    Column("peak_device_bytes", BigInteger),
    Column("communicated_bytes", BigInteger),
    Column("error", Text),
    # Bytes read from and written to the spill store.
    Column("spill_read_bytes", BigInteger),
    Column("spill_written_bytes", BigInteger),
    # The device of each part of the model as JSON, for strategies with such a plan.
    Column("plan", Text),
    # Peak bytes in the spill store.
    Column("spilled_bytes", BigInteger),
)

HYDRA_ATTEMPTS = Table(
    "hydra_attempts",
    METADATA,
    Column("attempt_id", String(32), primary_key=True),
    _study_column(),
    Column("number", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("state", String(32), nullable=False),
    Column("device", String(256)),
    Column("pid", Integer),
    Column("started", DateTime, nullable=False),
    Column("ended", DateTime),
    Column("error", Text),
    Column("traceback", Text),
    Index("ix_hydra_attempts_trial", "study_id", "number"),
)

HYDRA_METRICS = Table(
    "hydra_metrics",
    METADATA,
    _study_column(primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("name", String(LONGEST_NAME), primary_key=True),
    # SQLite has no NaN: for a value that is not finite, `special` is nan, inf or -inf and `value` is NULL.
    Column("value", Float(53)),
    Column("special", String(8)),
)

HYDRA_UNITS = Table(
    "hydra_units",
    METADATA,
    Column("unit_id", Integer, primary_key=True),
    _study_column(),
    Column("number", Integer, nullable=False),
    Column("attempt_id", String(32)),
    Column("kind", String(64), nullable=False),
    Column("device", String(256)),
    Column("started", Float(53), nullable=False),
    Column("seconds", Float(53), nullable=False),
    Column("peak_bytes", BigInteger),
    # For trials in shards: the shard, the bytes moved for it, and the number of steps that the row sums up.
    Column("shard", Integer),
    Column("read_bytes", BigInteger),
    Column("written_bytes", BigInteger),
    Column("steps", Integer),
    Index("ix_hydra_units_trial", "study_id", "number"),
    # For the dashboard's queries by time range.
    Index("ix_hydra_units_time", "study_id", "started"),
)

HYDRA_SPILLED = Table(
    "hydra_spilled",
    METADATA,
    _study_column(primary_key=True),
    # Seconds since 1970. The byte counts cover all trials and hold until the next row.
    Column("sampled", Float(53), primary_key=True, autoincrement=False),
    Column("host_bytes", BigInteger, nullable=False),
    Column("disk_bytes", BigInteger, nullable=False),
)

HYDRA_LEASES = Table(
    "hydra_leases",
    METADATA,
    _study_column(primary_key=True),
    Column("holder", String(32), nullable=False),
    Column("host", String(256), nullable=False),
    Column("pid", Integer, nullable=False),
    # Together with the pid, distinguishes a process from a later one with the same pid.
    Column("process_started", Float(53), nullable=False),
    Column("taken", DateTime, nullable=False),
    Column("renewed", DateTime, nullable=False),
)

HYDRA_EVENTS = Table(
    "hydra_events",
    METADATA,
    Column("event_id", Integer, primary_key=True),
    _study_column(),
    Column("number", Integer),
    Column("happened", DateTime, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("message", Text, nullable=False),
    Index("ix_hydra_events_study", "study_id", "number"),
)

HYDRA_CHECKPOINTS = Table(
    "hydra_checkpoints",
    METADATA,
    _study_column(primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("bytes", BigInteger, nullable=False),
    Column("seconds", Float(53), nullable=False),
    Column("made", DateTime, nullable=False),
)

HYDRA_ACTIONS = Table(
    "hydra_actions",
    METADATA,
    Column("action_id", Integer, primary_key=True),
    _study_column(),
    # The trial that the action applies to; NULL for the study.
    Column("number", Integer),
    Column("kind", String(32), nullable=False),
    Column("count", Integer),
    Column("asked", DateTime, nullable=False),
    # Time and text of the coordinator's answer.
    Column("answered", DateTime),
    Column("answer", Text),
    Index("ix_hydra_actions_study", "study_id", "answered"),
)

HYDRA_NOTES = Table(
    "hydra_notes",
    METADATA,
    _study_column(primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("text", Text, nullable=False),
    Column("changed", DateTime, nullable=False),
)


def key_columns(table: Table) -> tuple[str, ...]:
    """Return the columns that identify a row: in Optuna's tables not the surrogate primary key."""
    for constraint in table.constraints:
        if isinstance(constraint, UniqueConstraint):
            return tuple(column.name for column in constraint.columns)
    return tuple(column.name for column in table.primary_key.columns)
