"""Measurements of a training under the callback: throughput and peak memory of tensors."""

from __future__ import annotations

import time
from typing import Any

import torch

from hydra_tune.core import accelerator
from hydra_tune.core.tensor_memory import TensorBytes

COUNTED_BATCHES = 2
"""Batches in which all tensors are counted on a CPU: the first creates the optimizer's state, the second uses it."""


class Measures:
    """Counters of one fit. `batch_ends` is called after every batch, so it must be cheap.

    A batch's time starts at the end of the previous batch: it includes fetching, but not validation or checkpoints.
    """

    def __init__(self) -> None:
        self.batches = 0
        self._seconds = 0.0
        self._since = 0.0
        self._counted = 0
        self._tensors: TensorBytes | None = None
        self._counting = False

    def counts_next(self, module: Any) -> bool:
        """True if the tensors of the batch that begins now should be counted."""
        return self._counted < COUNTED_BATCHES and module.device.type == "cpu"

    def start_counting(self, module: Any) -> None:
        if self._tensors is None:
            self._tensors = TensorBytes([*module.parameters(), *module.buffers()])
        self._counted += 1
        self._counting = True
        self._tensors.__enter__()  # type: ignore[no-untyped-call]

    def goes_on(self) -> None:
        """Restart the clock: batches follow from now on."""
        self._since = time.perf_counter()

    def batch_ends(self, now: float) -> None:
        """Count a batch that ended at `now`, a time of `time.perf_counter`."""
        self.batches += 1
        if self._counting:
            self.stop_counting()
        else:  # batches in which tensors are counted are slower
            self._seconds += now - self._since
        self._since = now

    def stop_counting(self) -> None:
        """Stop counting tensors, also after a batch that raised."""
        if self._counting and self._tensors is not None:
            self._counting = False
            self._tensors.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def facts(self, trainer: Any) -> dict[str, Any]:
        """Return the measurements for the trial's record."""
        timed = self.batches - self._counted
        rate = timed / self._seconds if timed > 0 and self._seconds > 0 else None
        rows = getattr(trainer.train_dataloader, "batch_size", None)
        device: torch.device = trainer.strategy.root_device
        on_device = accelerator.peak_bytes(device)
        return {
            "strategy": type(trainer.strategy).__name__,
            "processes": trainer.world_size,
            "device": str(device),
            "peak_bytes": self._tensors.peak if on_device is None and self._tensors is not None else on_device,
            "batches": self.batches,
            "batches_per_second": rate,
            "rows_per_second": rate * rows * trainer.world_size if rate is not None and rows else None,
        }
