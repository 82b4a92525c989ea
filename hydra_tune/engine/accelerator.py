"""All that is specific to accelerators: one small module on `torch.accelerator`.

Only the CPU branches have been run by the project's tests; the others follow torch's documentation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def available() -> list[torch.device]:
    """The accelerators of this machine, in order; empty on a machine with CPUs only."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type == "cpu":
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def free_bytes(device: torch.device) -> int:
    """Free memory of an accelerator."""
    free, _total = torch.accelerator.get_memory_info(device)
    return int(free)


def use(device: torch.device) -> None:
    """Make `device` this process's default accelerator, as user code that says just "cuda" expects."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def begin_measuring(device: torch.device) -> None:
    """Forget the peak of earlier units."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """The most that tensors took on an accelerator since `begin_measuring`; None on a CPU, which keeps no count."""
    if device.type == "cpu":
        return None
    return int(torch.accelerator.max_memory_allocated(device))


def release_cached(device: torch.device) -> None:
    """Give memory that torch caches back to the device, so that other processes can have it."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


class Staging:
    """Moving bytes between a device's memory and files.

    Files are read and written by the CPU. On a CPU device that is all; on an accelerator the bytes pass through a
    pinned host buffer, on a stream of their own, so that the copy runs beside the computation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._buffers = threading.local()

    def read(self, content: torch.Tensor, fill: Callable[[torch.Tensor], object]) -> None:
        """Let `fill` put the bytes into host memory, and bring them to `content`."""
        if self._stream is None:
            fill(content)
            return
        host = self._host(content.numel())
        fill(host)
        # What the buffer held before may still be read by kernels that have been queued.
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            content.copy_(host, non_blocking=True)
        # The host buffer is used again, and the content is about to be used: it must have arrived.
        self._stream.synchronize()

    def write(self, content: torch.Tensor, drain: Callable[[torch.Tensor], object]) -> None:
        """Bring `content` to host memory and let `drain` write it."""
        if self._stream is None:
            drain(content)
            return
        host = self._host(content.numel())
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            host.copy_(content, non_blocking=True)
        self._stream.synchronize()
        drain(host)

    def _host(self, size: int) -> torch.Tensor:
        """A pinned buffer of this thread's, as large as the largest block so far."""
        held: torch.Tensor | None = getattr(self._buffers, "pinned", None)
        if held is None or held.numel() < size:
            held = self._buffers.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return held[:size]
