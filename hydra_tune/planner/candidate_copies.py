"""Copies of user objects, so that a survey of a candidate does not affect its later training.

A data set may have its own random streams and counters, and a loss may count its calls. Copies go through pickle, like
a candidate on its way to a device; the tensors and arrays of a data set, perhaps all of the data, are shared.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch
from torch.utils.data import TensorDataset

from hydra_tune.training.candidate import Candidate

T = TypeVar("T")


class CannotBeCopied(Exception):
    """A part of a candidate cannot be pickled, so it cannot be sent to another process either."""


def copied_candidate(candidate: Candidate) -> Candidate:
    """Return an independent copy of the candidate without its data."""
    try:
        copied: Candidate = cloudpickle.loads(cloudpickle.dumps(replace(candidate, train=list, valid=None)))
    except Exception as error:
        raise CannotBeCopied(f"{type(error).__name__}: {error}") from error
    return copied


def copied_data(data: T) -> T:
    """Return a copy of the data with its own state that shares tensors and arrays with the original."""
    if data is None or type(data) is TensorDataset:
        return data  # nothing in it changes
    shared: list[Any] = []
    content = io.BytesIO()
    try:
        _Sharing(content, shared).dump(data)
        content.seek(0)
        found: T = _Shared(content, shared).load()
    except Exception as error:
        raise CannotBeCopied(f"{type(error).__name__}: {error}") from error
    return found


class _Sharing(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles everything except tensors and arrays, which it sets aside."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, torch.Tensor | np.ndarray):
            return None
        self._shared.append(thing)
        return len(self._shared) - 1


class _Shared(pickle.Unpickler):
    """Unpickles data that `_Sharing` has just pickled in this process."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return self._shared[number]
