"""Pickling for the processes that `ddp_spawn` starts from a worker.

Classes of a user's script or notebook came to the worker by value and cannot be imported by name. `multiprocessing`
pickles by name; in a worker it must pickle by value, as the search does.
"""

from __future__ import annotations

import io
from collections import ChainMap
from multiprocessing import reduction
from typing import Any, ClassVar

import cloudpickle


class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the reducers of multiprocessing and torch for pipes, locks and tensors."""

    dispatch_table: ClassVar[Any] = ChainMap(
        reduction.ForkingPickler(io.BytesIO()).dispatch_table,
        cloudpickle.Pickler.dispatch_table,
    )


def carry_by_value() -> None:
    """Make `multiprocessing` pickle classes and functions by value in this process, which is a worker."""
    reduction.dump = _dump


def _dump(obj: Any, file: Any, protocol: int | None = None) -> None:
    ByValue(file, protocol).dump(obj)
