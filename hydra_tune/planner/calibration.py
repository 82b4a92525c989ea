"""Measures the speed of this machine's computation and byte transfers; `rates.py` keeps the rates."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hydra_tune.graph.placement.crowding import measured_crowding
from hydra_tune.planner.rates import keep_rates
from hydra_tune.strategies.pool import Rates

SIDE = 768
"""Rows and columns of the matrices in the timed product."""
BYTES = 64 * 2**20
"""Bytes copied, written and read per measurement."""
REPEATS = 3


def calibrate(host: Path, disk: Path, devices: int = 1) -> Rates:
    """Measure and keep the rates, with files in `host` (a tmpfs, if there is one) and on `disk`; about a second.

    With several devices, their mutual slowdown is measured too, in separate processes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        host_read, host_write = _file_rates(host)
        disk_read, disk_write = _file_rates(disk)
        found = Rates(
            compute=_compute(), copy=_copy(), host_read=host_read, host_write=host_write, disk_read=disk_read,
            disk_write=disk_write, crowding=_crowding(devices),
        )  # fmt: skip
        keep_rates(found)
        return found
    finally:
        torch.set_num_threads(threads)


def _crowding(devices: int) -> float:
    try:
        return measured_crowding(devices)
    except OSError:  # no process can be started for it; the other rates are still worth keeping
        return 1.0


def _best(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the seconds of the fastest of several runs, the least disturbed one."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return max(min(found), 1e-9)


def _compute() -> float:
    one, other = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    one @ other
    return float(2 * SIDE**3 / _best(lambda: one @ other, 5))


def _copy() -> float:
    source = torch.ones(BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return BYTES / _best(lambda: target.copy_(source))


def _file_rates(place: Path) -> tuple[float, float]:
    """Return bytes per second read and written, in existing pages like those of a spilled block."""
    content = memoryview(bytearray(BYTES))
    with tempfile.NamedTemporaryFile(dir=place, prefix="hydra-tune-rates-", buffering=0) as file:
        descriptor = file.fileno()

        def write() -> None:
            done = 0
            while done < BYTES:
                done += os.pwrite(descriptor, content[done:], done)

        def read() -> None:
            done = 0
            while done < BYTES:
                done += os.preadv(descriptor, [content[done:]], done)

        write()
        return BYTES / _best(read), BYTES / _best(write)
