"""Alembic's entry point: runs the migrations on the connection that `storage.schema` passes.

There is no offline mode and no ini file: migrations run only through `storage.schema`, in its transaction. Optuna keeps
its own version in the table `alembic_version` of the same database, so our version table has another name.
"""

from __future__ import annotations

from alembic import context

from hydra_tune.storage.schema import VERSION_TABLE
from hydra_tune.storage.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
