"""A table of the spill store's size over time, and a column for each trial's peak."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from hydra_tune.storage.migrations.versions.r0001_first_tables import study_column

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the table, on SQLite a trigger that deletes a deleted study's rows, and add the column."""
    op.create_table(
        "hydra_spilled",
        study_column(primary_key=True),
        sa.Column("sampled", sa.Float(53), primary_key=True, autoincrement=False),
        sa.Column("host_bytes", sa.BigInteger, nullable=False),
        sa.Column("disk_bytes", sa.BigInteger, nullable=False),
    )
    op.add_column("hydra_trials", sa.Column("spilled_bytes", sa.BigInteger))
    if op.get_bind().dialect.name == "sqlite":
        deletion = "DELETE FROM hydra_spilled WHERE study_id = OLD.study_id;"
        op.execute(f"CREATE TRIGGER hydra_study_deleted_0006 AFTER DELETE ON studies BEGIN {deletion} END")
