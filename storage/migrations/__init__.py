"""Alembic migrations of the `hydra_` tables, run from `storage.schema`."""
