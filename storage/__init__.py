"""The database of studies: Optuna's own tables, and the `hydra_` tables for records that Optuna does not keep.

    open_storage(url)    an Optuna storage over a SQLite file or a PostgreSQL server
    StudyRecords         writes the plan, attempts, metrics and units of one study
    queries              reads studies and trials back, for the command line and the results

Names are imported when they are first used, so that `import hydra_tune.storage` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydra_tune.storage.optuna_storage import HydraStorage, open_storage
    from hydra_tune.storage.records import StudyRecords

__all__ = ["HydraStorage", "StudyRecords", "open_storage"]


def __getattr__(name: str) -> object:
    if name in ("HydraStorage", "open_storage"):
        from hydra_tune.storage import optuna_storage

        return getattr(optuna_storage, name)
    if name == "StudyRecords":
        from hydra_tune.storage.records import StudyRecords

        return StudyRecords
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
