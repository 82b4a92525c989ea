"""Passes Python objects with large tensors between processes through files in shared memory.

The object travels as a pickle; each tensor storage and each large numpy array in it is written once to a file in the
run's directory and mapped by the receiver. A buffer that is sent again, such as a data set shared by all trials, is not
written again. The receiver's mapping is copy-on-write: it may change its data.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import weakref
import zlib
from pathlib import Path
from typing import Any, cast

import cloudpickle
import numpy as np
import torch
from torch import nn

_LARGE = 1 << 16
"""Smallest numpy array, in bytes, that gets a file."""


class TensorFiles:
    """Buffers that this process has written to files; each file is removed with its buffer's owner."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self._numbers = itertools.count()
        self._written: dict[int, tuple[int, Path]] = {}

    def file_of(self, owner: Any, key: int, content: np.ndarray[Any, Any]) -> Path:
        """Return the file with `content`, the bytes that `owner` holds at the address `key`.

        A buffer written before is compared by checksum: user code can change it unnoticed, and every candidate must get
        the data that its build saw.
        """
        checksum = zlib.crc32(memoryview(content))  # type: ignore[arg-type]
        before, path = self._written.get(key, (-1, Path()))
        if before != checksum:
            path = self.directory / f"{self.name}-{next(self._numbers)}"
            _write(content, path)
            self._written[key] = (checksum, path)
            weakref.finalize(owner, self._remove, key, path)
        return path

    def _remove(self, key: int, path: Path) -> None:
        if self._written.get(key, (0, None))[1] == path:
            del self._written[key]
        path.unlink(missing_ok=True)


def _write(content: np.ndarray[Any, Any], path: Path) -> None:
    try:
        content.tofile(path)
    except OSError as error:
        path.unlink(missing_ok=True)  # a partial file takes space that others need
        raise OSError(f"{content.nbytes} bytes cannot be written to {path} ({error})") from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, stream: io.BytesIO, files: TensorFiles) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.files = files

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, nn.Parameter) and _is_plain(obj):
            return self._tensor(obj)
        if type(obj) is np.ndarray and obj.nbytes >= _LARGE and obj.flags.c_contiguous and obj.dtype.kind in "biuf":
            path = self.files.file_of(obj, obj.ctypes.data, obj.reshape(-1).view(np.uint8))
            return _mapped_array, (str(path), obj.dtype.str, obj.shape)
        if type(obj) is torch.Generator:
            # torch pickles a generator with a temporary tensor, whose file would be removed too early.
            return _generator, (str(obj.device), obj.get_state().numpy().tobytes())
        return super().reducer_override(obj)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        path = ""
        if storage.nbytes() == tensor.element_size():
            # One number, such as a parameter that has no contents for the time being: no file is worth it.
            number = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
            form = (tensor.dtype, tuple(tensor.shape), tensor.stride())
            return _repeated, (number, *form, tensor.requires_grad and tensor.is_leaf, type(tensor) is nn.Parameter)
        if storage.nbytes():
            content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            path = str(self.files.file_of(storage, storage._cdata, content))
        shape = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return _mapped, (path, *shape, tensor.requires_grad and tensor.is_leaf, type(tensor) is nn.Parameter)


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if bytes, shape and strides describe the tensor fully; others are pickled by torch itself."""
    special = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or bool(vars(tensor))
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not special


def pack(obj: object, files: TensorFiles) -> bytes:
    """Return the object as a pickle that refers to its tensors by file."""
    stream = io.BytesIO()
    _Pickler(stream, files).dump(obj)
    return stream.getvalue()


def unpack(data: bytes) -> Any:
    """Return the packed object with its tensors mapped from files; call it while the sender still holds them."""
    _open_storages.clear()
    try:
        return pickle.loads(data)
    finally:
        _open_storages.clear()


_open_storages: dict[str, torch.UntypedStorage] = {}
"""Storages of the object being unpacked, so that tensors that shared a storage share it again."""


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


def _repeated(
    number: bytes, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], grad: bool, param: bool
) -> torch.Tensor:
    one = torch.frombuffer(bytearray(number), dtype=torch.uint8).view(dtype).clone()
    # Not a view to autograd: it may be changed in place.
    tensor = torch.empty(0, dtype=dtype).set_(one.untyped_storage(), 0, size, stride)
    return nn.Parameter(tensor, requires_grad=grad) if param else tensor.requires_grad_(grad)


def _generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _mapped_array(path: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    # Copy on write, as for tensors.
    return np.memmap(path, dtype=dtype, mode="c", shape=shape).view(np.ndarray)
