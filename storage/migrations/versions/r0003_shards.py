"""Columns for trials in shards: spill bytes read and written per trial and unit, and each unit's shard."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns; they are NULL in older records."""
    for name in ("spill_read_bytes", "spill_written_bytes"):
        op.add_column("hydra_trials", sa.Column(name, sa.BigInteger))
    op.add_column("hydra_units", sa.Column("shard", sa.Integer))
    for name in ("read_bytes", "written_bytes"):
        op.add_column("hydra_units", sa.Column(name, sa.BigInteger))
    op.add_column("hydra_units", sa.Column("steps", sa.Integer))
