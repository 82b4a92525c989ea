"""The steps by which the `hydra_` tables came to their present form, run by Alembic from `storage.schema`."""
