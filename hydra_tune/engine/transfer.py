"""Handing Python objects with large tensors from one process to another through files on shared memory.

The object travels as a pickle over the pipes; each tensor storage in it is written once to a file in the run's
directory and mapped by whoever receives it. A storage that is handed over again, such as a data set that all trials
share, is not written again. The receiver's mapping is private: it may change what it got, and the first write to a page
copies it.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import weakref
from pathlib import Path
from typing import Any, cast

import cloudpickle
import torch
from torch import nn


class TensorFiles:
    """The storages that this process has written to files; each file goes when its storage does."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self._numbers = itertools.count()
        self._written: dict[int, tuple[int, Path]] = {}

    def file_of(self, tensor: torch.Tensor) -> Path:
        storage = tensor.untyped_storage()
        key = storage._cdata
        version, path = self._written.get(key, (-1, Path()))
        if version != tensor._version:
            path = self.directory / f"{self.name}-{next(self._numbers)}"
            _write(storage, path)
            self._written[key] = (tensor._version, path)
            weakref.finalize(storage, self._remove, key, path)
        return path

    def _remove(self, key: int, path: Path) -> None:
        if self._written.get(key, (0, None))[1] == path:
            del self._written[key]
        path.unlink(missing_ok=True)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, stream: io.BytesIO, files: TensorFiles) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.files = files

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, nn.Parameter) and obj.device.type == "cpu" and obj.layout is torch.strided:
            if not obj.is_leaf:
                obj = obj.detach()
            path = self.files.file_of(obj) if obj.untyped_storage().nbytes() else None
            shape = (obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride())
            return _mapped, (str(path) if path else "", *shape, obj.requires_grad, type(obj) is nn.Parameter)
        return super().reducer_override(obj)


def pack(obj: object, files: TensorFiles) -> bytes:
    """The object as a pickle that refers to its tensors by file."""
    stream = io.BytesIO()
    _Pickler(stream, files).dump(obj)
    return stream.getvalue()


def unpack(data: bytes) -> Any:
    """The object that `pack` made, its tensors mapped from their files; call it while the sender still holds them."""
    _open_storages.clear()
    try:
        return pickle.loads(data)
    finally:
        _open_storages.clear()


_open_storages: dict[str, torch.UntypedStorage] = {}
"""While one object is unpacked: tensors that shared a storage share it again."""


def _mapped(
    path: str,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    grad: bool,
    param: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype)
    if path:
        if path not in _open_storages:
            mapped = torch.UntypedStorage.from_file(path, shared=False, nbytes=os.path.getsize(path))
            _open_storages[path] = cast(torch.UntypedStorage, mapped)
        tensor.set_(_open_storages[path], offset, size, stride)
    else:
        tensor = torch.empty_strided(size, stride, dtype=dtype)
    return nn.Parameter(tensor, requires_grad=grad) if param else tensor.requires_grad_(grad)


def _write(storage: torch.UntypedStorage, path: Path) -> None:
    view = torch.empty(0, dtype=torch.uint8).set_(storage)
    with open(path, "wb") as file:
        view.numpy().tofile(file)
