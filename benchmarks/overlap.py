"""Measures the share of block copies that runs while the test accelerator computes, by its own clock.

A chain of layers of equal size, whose weights are blocks that do not fit the device together: forward, backward and a
step of plain SGD, moved by the device memory that trials in shards use. Copies and products take the seconds that the
set rates give them, so the figures do not depend on this machine. The transfer thread's loads are made in line, with a
host time of their own, so that each run is the same.

`copy_hidden_fraction`: the part of the copying that lies within compute, where compute takes 1.4 times as long.
`vs_resident`: throughput against everything in device memory, where both take equally long.
`without_overlap`: the same, where each copy is waited for, as before streams were used.
`vs_resident_with_host_optimizer` is null: there is no such optimizer yet.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import arguments, finish
from hydra_tune.spill.device_memory import DeviceMemory
from hydra_tune.spill.store import SpillFiles

DEVICE = "testdev:0"
WIDTH, ROWS = 256, 64
BLOCK = WIDTH * WIDTH * 4
PRODUCT = 2 * ROWS * WIDTH * WIDTH
SECONDS = 1e-3
"""Time of one product; forward takes one for each layer, backward two."""


@dataclass(frozen=True)
class Measured:
    """One run by the devices' clock."""

    seconds: float
    hidden: float
    peak_bytes: int


class Run:
    """Trains the chain for some batches."""

    def __init__(self, backend: Any, layers: int, blocks: int, copy_seconds: float, *, overlap: bool) -> None:
        self.backend = backend
        self.layers = layers
        self.budget = blocks * BLOCK
        self.overlap = overlap
        rate = BLOCK / copy_seconds
        backend.set_rates(operations=PRODUCT / SECONDS, copy_in=rate, copy_out=rate)
        self._loads = 0.0
        """Host time of the transfer thread."""

    def measure(self, batches: int) -> Measured:
        """Return the seconds of a batch after the first."""
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        with tempfile.TemporaryDirectory() as folder:
            self.files = SpillFiles([Path(folder)], "trial")
            for layer in range(self.layers):
                self.files.write(str(layer), 0, torch.zeros(BLOCK, dtype=torch.uint8))
            self.files.commit(None)
            self.memory = DeviceMemory(self.budget, torch.device(DEVICE), prefetch=False)
            self.memory.running = self.files
            self._batch(0)
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats(DEVICE)
            began = self.backend.host_time()
            with self.backend.traced() as trace:
                for batch in range(1, batches + 1):
                    self._batch(batch)
                torch.accelerator.synchronize()
            seconds = (self.backend.host_time() - began) / batches
            peak = torch.accelerator.max_memory_allocated(DEVICE)
            self.memory.flush(self.files)
            self.memory.close()
        return Measured(seconds, hidden_fraction(trace), peak)

    def _batch(self, batch: int) -> None:
        last, base = self.layers - 1, 2 * self.layers * batch
        value = torch.zeros(ROWS, WIDTH, device=DEVICE)
        for layer in range(self.layers):
            weight = self._weight(layer)
            value = value @ weight
            self._release(layer, base + 2 * last - layer + 1)
            self._bring_in(layer + 1 if layer < last else last - 1, base + layer + 1)
        for layer in reversed(range(self.layers)):
            weight = self._weight(layer)
            gradient = value.t() @ value
            value = value @ weight.t()
            weight.sub_(gradient, alpha=0.1)
            self._release(layer, base + 2 * self.layers + layer, changed=base + layer + 1)
            self._bring_in(max(layer - 1, 0) if layer else 1, base + 2 * self.layers - layer)

    def _weight(self, layer: int) -> torch.Tensor:
        block = self.memory.acquire(self.files, str(layer), 0.0)
        self._wait_for_all()
        return block.view(torch.float32).view(WIDTH, WIDTH)

    def _release(self, layer: int, due: float, changed: int | None = None) -> None:
        self.memory.release(self.files, str(layer), due, changed_at=changed)

    def _bring_in(self, layer: int, due: float) -> None:
        """Load the next layers as the transfer thread would: at its own time, from now on."""
        self._wait_for_all()
        now = self.backend.host_time()
        self.backend.set_host_time(max(now, self._loads))
        self.memory.load(self.files, str(layer), due)
        self._wait_for_all()
        self._loads = self.backend.host_time()
        if self.overlap:
            self.backend.set_host_time(now)

    def _wait_for_all(self) -> None:
        if not self.overlap:
            torch.accelerator.synchronize()


def hidden_fraction(trace: Iterable[Any]) -> float:
    """Return the part of the seconds of copies that lie within compute."""
    work = list(trace)
    computing = sorted((t.start, t.end) for t in work if t.engine == "compute" and t.end > t.start)
    copies = [t for t in work if t.engine in ("in", "out")]
    whole = sum(t.end - t.start for t in copies)
    covered = sum(max(0.0, min(t.end, end) - max(t.start, start)) for t in copies for start, end in computing)
    return covered / whole if whole else 1.0


def main() -> None:
    given = arguments(__doc__ or "")
    from tests.accelerator import backend

    layers, batches = (12, 2) if given.quick else (48, 4)
    in_memory = Run(backend, layers, layers + 1, SECONDS, overlap=True).measure(batches)
    # A batch reads each block twice, so that copies of 1.5 products balance three products for each layer.
    balanced = Run(backend, layers, 6, 1.5 * SECONDS, overlap=True).measure(batches)
    quick = Run(backend, layers, 6, 1.5 / 1.4 * SECONDS, overlap=True).measure(batches)
    waiting = Run(backend, layers, 6, 1.5 * SECONDS, overlap=False).measure(batches)
    document = {
        "copy_hidden_fraction": round(quick.hidden, 4),
        "vs_resident": round(in_memory.seconds / balanced.seconds, 4),
        "vs_resident_with_host_optimizer": None,
        "without_overlap": round(in_memory.seconds / waiting.seconds, 4),
        "budget_bytes": 6 * BLOCK, "peak_bytes": balanced.peak_bytes, "layers": layers,
    }  # fmt: skip
    finish([(name, str(value)) for name, value in document.items()], document)


if __name__ == "__main__":
    main()
