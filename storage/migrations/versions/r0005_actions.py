"""Tables for actions (requests from the dashboard) and notes on trials, and an index of units by time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from hydra_tune.storage.migrations.versions.r0001_first_tables import study_column

revision = "0005"
down_revision = "0004"

TABLES = ("hydra_actions", "hydra_notes")


def upgrade() -> None:
    """Create the tables and the index, and on SQLite a trigger that deletes a deleted study's rows."""
    op.create_table(
        "hydra_actions",
        sa.Column("action_id", sa.Integer, primary_key=True),
        study_column(),
        sa.Column("number", sa.Integer),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("count", sa.Integer),
        sa.Column("asked", sa.DateTime, nullable=False),
        sa.Column("answered", sa.DateTime),
        sa.Column("answer", sa.Text),
    )
    op.create_index("ix_hydra_actions_study", "hydra_actions", ["study_id", "answered"])
    op.create_table(
        "hydra_notes",
        study_column(primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("changed", sa.DateTime, nullable=False),
    )
    op.create_index("ix_hydra_units_time", "hydra_units", ["study_id", "started"])
    if op.get_bind().dialect.name == "sqlite":
        deletions = "".join(f" DELETE FROM {table} WHERE study_id = OLD.study_id;" for table in TABLES)
        op.execute(f"CREATE TRIGGER hydra_study_deleted_0005 AFTER DELETE ON studies BEGIN{deletions} END")
