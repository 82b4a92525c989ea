"""Measures the memory that an objective takes in a worker, so that trials beside it are begun only where they fit.

On accelerators torch counts it. On CPUs it is the growth of the process's resident memory, which Linux counts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydra_tune.engine.worker import WorkerContext

SHORTEST = 0.02
"""Seconds of a trial for which measuring is worth its time."""
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class ObjectiveMemory:
    """Peak memory of one trial, from its beginning on."""

    def __init__(self, context: WorkerContext) -> None:
        self._devices = context.setup.torch_devices
        self._on_accelerator = context.on_accelerator
        self._began = time.monotonic()
        self._before: int | None = None
        if not self._on_accelerator and sys.platform == "linux":
            try:
                _RESET.write_text("5")  # the peak counts from now on
            except OSError:  # a system that does not let a process do this
                return
            self._before = _status_bytes("VmRSS")

    def peak(self) -> int | None:
        """Return the peak bytes so far; None if they are unknown, or the trial has just begun."""
        if time.monotonic() - self._began < SHORTEST:
            return None
        if self._on_accelerator:
            return _reserved_bytes(self._devices)
        return None if self._before is None else max(0, _status_bytes("VmHWM") - self._before)


def _reserved_bytes(devices: tuple[str, ...]) -> int | None:
    """Return the most that torch has taken from one of the devices; None if user code does not use torch."""
    if "torch" not in sys.modules:
        return None
    import torch

    return max(int(torch.accelerator.max_memory_reserved(torch.device(each))) for each in devices)


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise LookupError(f"{_STATUS} has no {field}")
