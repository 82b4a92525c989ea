"""A column for a trial's plan: the device of each part of the model, with predicted and measured times."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the column; it is NULL in older records."""
    op.add_column("hydra_trials", sa.Column("plan", sa.Text))
