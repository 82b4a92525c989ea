"""Copies of what user code made, so that a look at a candidate leaves no trace in what is trained afterwards.

A data set may have random streams and counters of its own, and a loss may count its calls. Copies go through pickle, as
a candidate does on its way to a device; of a data set the tensors and arrays, which may be all of the data, are shared.
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

from hydra_tune.candidate import Candidate

T = TypeVar("T")


class CannotBeCopied(Exception):
    """A part of a candidate cannot be pickled: it cannot be sent to another process either."""


def copied_candidate(candidate: Candidate) -> Candidate:
    """The candidate but for its data, with nothing in common with the original."""
    try:
        copied: Candidate = cloudpickle.loads(cloudpickle.dumps(replace(candidate, train=list, valid=None)))
    except Exception as error:
        raise CannotBeCopied(f"{type(error).__name__}: {error}") from error
    return copied


def copied_data(data: T) -> T:
    """The same data with a state of its own; tensors and arrays are those of the original."""
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
    """Pickles all but tensors and arrays, which are put aside."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, torch.Tensor | np.ndarray):
            return None
        self._shared.append(thing)
        return len(self._shared) - 1


class _Shared(pickle.Unpickler):
    """What `_Sharing` has pickled a moment ago, in this process."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return self._shared[number]
