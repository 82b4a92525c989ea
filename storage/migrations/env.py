"""Alembic's entry: runs the steps on the connection that `storage.schema` hands over.

There is no offline mode and no ini file: the steps only ever run through `storage.schema`, in its
transaction. Optuna keeps its own version in the table `alembic_version` of the same database, so ours has
another name.
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
