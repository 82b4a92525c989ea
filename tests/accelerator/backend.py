"""The test accelerator `testdev`: registers its devices with torch when imported.

Devices of this process that behave like accelerators: memory of their own, streams behind the host, events, pinned
memory, generators. Settings are read from the environment, so that workers of a search get them too:

    TESTDEV_DEVICES   number of devices (2)
    TESTDEV_MEMORY    bytes of each device, or one number for each, separated by commas (1 GiB)
    TESTDEV_DELAYS    SEED:MICROSECONDS, random delays of up to so long before copies and some kernels (none)
"""

from __future__ import annotations

import atexit
import ctypes
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.accelerator.build import library

NAME = "testdev"


def _load() -> ctypes.CDLL:
    path, seed, longest = library(), 0, 0
    found = ctypes.CDLL(str(path))
    found.testdev_set_memory.argtypes = [ctypes.c_int, ctypes.c_uint64]
    found.testdev_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
    found.testdev_random_state.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
    found.testdev_random_state.restype = ctypes.c_int64
    found.testdev_set_random_state.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
    found.testdev_rates.argtypes = [ctypes.c_double] * 5
    found.testdev_hold.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    found.testdev_host_time.restype = ctypes.c_double
    found.testdev_set_host_time.argtypes = [ctypes.c_double]
    found.testdev_read_trace.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    found.testdev_read_trace.restype = ctypes.c_int64
    if os.environ.get("TESTDEV_DELAYS"):
        seed, longest = (int(part) for part in os.environ["TESTDEV_DELAYS"].split(":"))
    devices = int(os.environ.get("TESTDEV_DEVICES", "2"))
    found.testdev_configure(devices, seed, longest)
    sizes = [int(size) for size in os.environ.get("TESTDEV_MEMORY", str(2**30)).split(",")]
    for device in range(devices):
        found.testdev_set_memory(device, sizes[min(device, len(sizes) - 1)])
    return found


def _index(device: Any = None) -> int:
    if device is None:
        return device_count() and current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else int(index)


# What torch asks of a device's module


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return int(_library.testdev_device_count())


def current_device() -> int:
    return int(_library.testdev_current_device())


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def manual_seed(seed: int) -> None:
    _library.testdev_seed(current_device(), seed % 2**64)


def manual_seed_all(seed: int) -> None:
    for device in range(device_count()):
        _library.testdev_seed(device, seed % 2**64)


def get_rng_state(device: Any = None) -> torch.Tensor:
    size = _library.testdev_random_state(_index(device), None, 0)
    state = torch.empty(size, dtype=torch.uint8)
    _library.testdev_random_state(_index(device), state.data_ptr(), size)
    return state


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    state = state.contiguous()
    _library.testdev_set_random_state(_index(device), state.data_ptr(), state.numel())


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# What tests ask of the devices


def set_memory(device: int, size: int) -> None:
    """Give a device `size` bytes of memory."""
    _library.testdev_set_memory(device, size)


def set_delays(seed: int, microseconds: int) -> None:
    """Delay copies and some kernels by up to so many microseconds; streams made from now on draw by this seed."""
    _library.testdev_configure(device_count(), seed, microseconds)


@contextmanager
def held(*streams: torch.Stream) -> Iterator[None]:
    """Let these streams do nothing until somebody waits for them: as late as the program's waits allow."""
    for stream in streams:
        _library.testdev_hold(stream.device_index, stream.stream_id, 1)
    try:
        yield
    finally:
        for stream in streams:
            _library.testdev_hold(stream.device_index, stream.stream_id, 0)


def set_rates(
    *, operations: float = 0, memory: float = 0, copy_in: float = 0, copy_out: float = 0, peer: float = 0
) -> None:
    """Set the devices' speed by their own clock: floating-point operations and bytes a second; 0 is at once."""
    _library.testdev_rates(operations, memory, copy_in, copy_out, peer)


def host_time() -> float:
    """Return this thread's time by the devices' clock, in seconds."""
    return float(_library.testdev_host_time())


def set_host_time(seconds: float) -> None:
    """Set this thread's time, as another thread that it stands for would have it."""
    _library.testdev_set_host_time(seconds)


@dataclass(frozen=True)
class Traced:
    """A piece of work by the devices' clock."""

    device: int
    stream: int
    engine: str
    """compute, in, out or peer"""
    name: str
    bytes: int
    start: float
    end: float


@contextmanager
def traced() -> Iterator[list[Traced]]:
    """Collect the work that is queued within; the list is filled at the end."""
    _library.testdev_trace(1)
    found: list[Traced] = []
    try:
        yield found
    finally:
        _library.testdev_trace(0)
        size = _library.testdev_read_trace(None, 0)
        text = ctypes.create_string_buffer(size)
        _library.testdev_read_trace(text, size)
        for line in text.raw.decode().splitlines():
            device, stream, engine, name, bytes, start, end = line.split(" ")
            found.append(Traced(int(device), int(stream), engine, name, int(bytes), float(start), float(end)))


def _register() -> None:
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    wanted = (
        is_available, is_initialized, device_count, current_device, set_device, synchronize, manual_seed,
        manual_seed_all, get_rng_state, set_rng_state, _is_in_bad_fork, get_amp_supported_dtype,
    )  # fmt: skip
    for function in wanted:
        setattr(module, function.__name__, function)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # Threads of streams must not be in the middle of work when the process ends.
    atexit.register(lambda: [synchronize(device) for device in range(device_count())])


_library = _load()
_register()
