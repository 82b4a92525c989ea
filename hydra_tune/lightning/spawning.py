"""What a worker's own processes are given: `ddp_spawn` inside a search.

The classes of a user's script or notebook came to the worker by value, and no name leads to them. `multiprocessing`
pickles by name; in a worker it has to pickle as the search does.
"""

from __future__ import annotations

import io
from collections import ChainMap
from multiprocessing import reduction
from typing import Any, ClassVar

import cloudpickle


class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the ways that multiprocessing and torch have for pipes, locks and tensors."""

    dispatch_table: ClassVar[Any] = ChainMap(
        reduction.ForkingPickler(io.BytesIO()).dispatch_table,
        cloudpickle.Pickler.dispatch_table,
    )


def carry_by_value() -> None:
    """Let `multiprocessing` send classes and functions by value in this process, which is a worker."""
    reduction.dump = _dump


def _dump(obj: Any, file: Any, protocol: int | None = None) -> None:
    ByValue(file, protocol).dump(obj)
