"""Which part of a trial's model ran where: the stages of a pipeline, with predicted and measured times."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the column; it is empty for what was recorded before."""
    op.add_column("hydra_trials", sa.Column("plan", sa.Text))
