"""First tables: studies, trials, attempts, metrics, units."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

TABLES = ("hydra_units", "hydra_metrics", "hydra_attempts", "hydra_trials", "hydra_studies")


def upgrade() -> None:
    """Create the tables, and on SQLite a trigger that deletes a deleted study's rows from them."""
    create_studies_and_trials()
    create_attempts_and_metrics()
    create_units()
    if op.get_bind().dialect.name == "sqlite":
        op.execute(sqlite_trigger())


def create_studies_and_trials() -> None:
    """Create the tables of what Optuna's tables of studies and trials do not hold."""
    op.create_table(
        "hydra_studies",
        study_column(primary_key=True),
        sa.Column("seed", sa.BigInteger),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("settings", sa.Text, nullable=False),
        sa.Column("spec", sa.Text),
        sa.Column("created", sa.DateTime, nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
    )
    op.create_table(
        "hydra_trials",
        study_column(primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("seed", sa.BigInteger),
        sa.Column("strategy", sa.String(64)),
        sa.Column("shards", sa.Integer),
        sa.Column("status", sa.String(32)),
        sa.Column("device", sa.String(256)),
        sa.Column("seconds", sa.Float(53)),
        sa.Column("peak_device_bytes", sa.BigInteger),
        sa.Column("communicated_bytes", sa.BigInteger),
        sa.Column("error", sa.Text),
    )


def create_attempts_and_metrics() -> None:
    """Create the tables of tries at a trial, and of all metrics of each epoch."""
    op.create_table(
        "hydra_attempts",
        sa.Column("attempt_id", sa.String(32), primary_key=True),
        study_column(),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("device", sa.String(256)),
        sa.Column("pid", sa.Integer),
        sa.Column("started", sa.DateTime, nullable=False),
        sa.Column("ended", sa.DateTime),
        sa.Column("error", sa.Text),
        sa.Column("traceback", sa.Text),
    )
    op.create_index("ix_hydra_attempts_trial", "hydra_attempts", ["study_id", "number"])
    op.create_table(
        "hydra_metrics",
        study_column(primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(512), primary_key=True),
        sa.Column("value", sa.Float(53)),
        sa.Column("special", sa.String(8)),
    )


def create_units() -> None:
    """Create the table of the work that was done on each device."""
    op.create_table(
        "hydra_units",
        sa.Column("unit_id", sa.Integer, primary_key=True),
        study_column(),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("attempt_id", sa.String(32)),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("device", sa.String(256)),
        sa.Column("started", sa.Float(53), nullable=False),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.Column("peak_bytes", sa.BigInteger),
    )
    op.create_index("ix_hydra_units_trial", "hydra_units", ["study_id", "number"])


def study_column(**options: Any) -> sa.Column[int]:
    """Return the column that refers to a row's study; the row is deleted with the study."""
    parent = sa.ForeignKey("studies.study_id", ondelete="CASCADE")
    return sa.Column("study_id", sa.Integer, parent, nullable=False, autoincrement=False, **options)


def sqlite_trigger() -> str:
    """Return a trigger that deletes our rows of a deleted study.

    Optuna's own connections do not enforce foreign keys on SQLite, and SQLite reuses deleted ids. Without the trigger,
    a study deleted by Optuna or its dashboard would leave rows that the next study inherits.
    """
    deletes = " ".join(f"DELETE FROM {table} WHERE study_id = OLD.study_id;" for table in TABLES)
    return f"CREATE TRIGGER hydra_study_deleted AFTER DELETE ON studies BEGIN {deletes} END"
