"""Tables for leases, events and checkpoints, and a column for a study's source."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from hydra_tune.storage.migrations.versions.r0001_first_tables import study_column

revision = "0002"
down_revision = "0001"

TABLES = ("hydra_leases", "hydra_events", "hydra_checkpoints")


def upgrade() -> None:
    """Create the tables, and on SQLite a trigger that deletes a deleted study's rows from them."""
    op.add_column("hydra_studies", sa.Column("source", sa.Text))
    op.create_table(
        "hydra_leases",
        study_column(primary_key=True),
        sa.Column("holder", sa.String(32), nullable=False),
        sa.Column("host", sa.String(256), nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("process_started", sa.Float(53), nullable=False),
        sa.Column("taken", sa.DateTime, nullable=False),
        sa.Column("renewed", sa.DateTime, nullable=False),
    )
    op.create_table(
        "hydra_events",
        sa.Column("event_id", sa.Integer, primary_key=True),
        study_column(),
        sa.Column("number", sa.Integer),
        sa.Column("happened", sa.DateTime, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
    )
    op.create_index("ix_hydra_events_study", "hydra_events", ["study_id", "number"])
    op.create_table(
        "hydra_checkpoints",
        study_column(primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.Column("made", sa.DateTime, nullable=False),
    )
    if op.get_bind().dialect.name == "sqlite":
        deletions = "".join(f" DELETE FROM {table} WHERE study_id = OLD.study_id;" for table in TABLES)
        op.execute(f"CREATE TRIGGER hydra_study_deleted_0002 AFTER DELETE ON studies BEGIN{deletions} END")


def downgrade() -> None:
    """Remove the tables and the column."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER hydra_study_deleted_0002")
    for table in TABLES:
        op.drop_table(table)
    op.drop_column("hydra_studies", "source")
