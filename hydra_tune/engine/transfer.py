"""Passes Python objects with large tensors between processes through files in shared memory.

The object travels as a pickle; each tensor storage and each large numpy array in it is written once to a file in the
run's directory and mapped by the receiver. A large buffer has a file of its own; small ones, which may be ten thousands
(samples of a data set, parameters of a deep model), share one, as a process may only have some 65,000 mappings. A
buffer that is sent again, such as a data set shared by all trials, is not written again. The receiver's mapping is
copy-on-write: it may change its data.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import weakref
import zlib
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, cast

import cloudpickle
import numpy as np
import torch
from torch import nn

_LARGE = 1 << 16
"""Smallest numpy array, in bytes, that travels in a file."""
OWN_FILE = 1 << 20
"""Smallest buffer, in bytes, that gets a file of its own."""
MOST_OWN = 4096
"""Most files of their own at a time; further large buffers share one too."""
_ALIGNED = 64
"""Bytes to which buffers are aligned in a shared file."""


@dataclass(frozen=True)
class FileSpan:
    """Location of a buffer: a file, and its first byte there; `size` is None if the file holds nothing else."""

    path: str
    start: int = 0
    size: int | None = None


class TensorFiles:
    """Buffers that this process has written to files; each file is removed with the owner of its last buffer."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self._numbers = itertools.count()
        self._written: dict[int, tuple[int, FileSpan]] = {}
        self._buffers: Counter[str] = Counter()
        """Buffers in each file that have an owner."""
        self._own = 0
        self._shared: _SharedFile | None = None

    def place_of(self, owner: Any, key: int, content: np.ndarray[Any, Any]) -> FileSpan:
        """Return the place of `content`, the bytes that `owner` holds at the address `key`.

        A buffer written before is compared by checksum: user code can change it unnoticed, and every candidate must get
        the data that its build saw.
        """
        checksum = zlib.crc32(memoryview(content))  # type: ignore[arg-type]
        before, place = self._written.get(key, (-1, FileSpan("")))
        if before != checksum:
            place = self._write(content)
            self._written[key] = (checksum, place)
            self._buffers[place.path] += 1
            self._own += place.size is None
            weakref.finalize(owner, self._remove, key, place)
        return place

    def _write(self, content: np.ndarray[Any, Any]) -> FileSpan:
        if content.nbytes >= OWN_FILE and self._own < MOST_OWN:
            path = self.directory / f"{self.name}-{next(self._numbers)}"
            _write(content, path)
            return FileSpan(str(path))
        if self._shared is None:
            self._shared = _SharedFile(self.directory / f"{self.name}-{next(self._numbers)}")
        return self._shared.add(content)

    def finish(self) -> None:
        """Complete the shared file of an object: the next object's buffers go to another."""
        if self._shared is not None:
            self._shared.close()
            path, self._shared = self._shared.path, None
            self._drop_if_unused(path)

    def give_up(self) -> None:
        """Delete the shared file of an object that could not be packed."""
        if self._shared is not None:
            path, self._shared = self._shared.path, None
            self._written = {key: found for key, found in self._written.items() if found[1].path != path}
            Path(path).unlink()

    def _remove(self, key: int, place: FileSpan) -> None:
        if self._written.get(key, (0, None))[1] == place:
            del self._written[key]
        self._buffers[place.path] -= 1
        self._own -= place.size is None
        self._drop_if_unused(place.path)

    def _drop_if_unused(self, path: str) -> None:
        being_written = self._shared is not None and self._shared.path == path
        if self._buffers[path] <= 0 and not being_written:
            del self._buffers[path]
            Path(path).unlink(missing_ok=True)


class _SharedFile:
    """A file that small buffers are appended to."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._file = path.open("wb")  # closed by `close`

    def add(self, content: np.ndarray[Any, Any]) -> FileSpan:
        start = self._file.tell()
        try:
            self._file.write(memoryview(content))  # type: ignore[arg-type]
            self._file.write(bytes(-content.nbytes % _ALIGNED))
        except OSError as error:
            raise OSError(f"{content.nbytes} bytes cannot be written to {self.path} ({error})") from error
        return FileSpan(self.path, start, content.nbytes)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # what was buffered had no room
            raise OSError(f"tensors cannot be written to {self.path} ({error})") from error


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
            place = self.files.place_of(obj, obj.ctypes.data, obj.reshape(-1).view(np.uint8))
            return _mapped_array, (*astuple(place), obj.dtype.str, obj.shape)
        if type(obj) is torch.Generator:
            # torch pickles a generator with a temporary tensor, whose file would be removed too early.
            return _generator, (str(obj.device), obj.get_state().numpy().tobytes())
        return super().reducer_override(obj)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        place = FileSpan("")
        if storage.nbytes() == tensor.element_size():
            # One number, such as a parameter that has no contents for the time being: no file is worth it.
            number = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
            form = (tensor.dtype, tuple(tensor.shape), tensor.stride())
            return _repeated, (number, *form, tensor.requires_grad and tensor.is_leaf, type(tensor) is nn.Parameter)
        if storage.nbytes():
            content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            place = self.files.place_of(storage, storage._cdata, content)
        shape = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return _mapped, (*astuple(place), *shape, tensor.requires_grad and tensor.is_leaf, type(tensor) is nn.Parameter)


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if bytes, shape and strides describe the tensor fully; others are pickled by torch itself."""
    special = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or bool(vars(tensor))
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not special


def pack(obj: object, files: TensorFiles) -> bytes:
    """Return the object as a pickle that refers to its tensors by file."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, files).dump(obj)
        files.finish()
    except BaseException:
        files.give_up()
        raise
    return stream.getvalue()


def unpack(data: bytes) -> Any:
    """Return the packed object with its tensors mapped from files; call it while the sender still holds them."""
    try:
        return pickle.loads(data)
    finally:
        _open_storages.clear()
        _open_files.clear()


_open_storages: dict[tuple[str, int], torch.UntypedStorage] = {}
"""Storages of the object being unpacked, so that tensors that shared a storage share it again."""
_open_files: dict[str, np.ndarray[Any, Any]] = {}
"""Mappings of files of the object being unpacked, copy-on-write."""


def _bytes_of(path: str, start: int, size: int | None) -> np.ndarray[Any, Any]:
    """Return a buffer as bytes: a part of the one mapping of its file."""
    if path not in _open_files:
        _open_files[path] = np.memmap(path, dtype=np.uint8, mode="c").view(np.ndarray)
    return _open_files[path][start : None if size is None else start + size]


def _storage_of(path: str, start: int, size: int | None) -> torch.UntypedStorage:
    if (path, start) not in _open_storages:
        if size is None:
            mapped = torch.UntypedStorage.from_file(path, shared=False, nbytes=os.path.getsize(path))
        else:
            # The storage is the buffer alone, not the whole file, and keeps the mapping.
            mapped = torch.from_numpy(_bytes_of(path, start, size)).untyped_storage()
        _open_storages[path, start] = cast(torch.UntypedStorage, mapped)
    return _open_storages[path, start]


def _mapped(
    path: str,
    start: int,
    bytes: int | None,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    grad: bool,
    param: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype)
    if path:
        tensor.set_(_storage_of(path, start, bytes), offset, size, stride)
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


def _mapped_array(path: str, start: int, size: int | None, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return _bytes_of(path, start, size).view(dtype).reshape(shape)
