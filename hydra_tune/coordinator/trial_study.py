"""The study as one attempt sees it.

On the coordinator's machine it is the study's thread; on another node of a cluster it forwards to the coordinator.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from hydra_tune.engine.unit import StepRecord


class TrialStudy(Protocol):
    """Answers and records of the study that an attempt needs; called from the event loop."""

    @property
    def stopped(self) -> Container[int]:
        """Running trials that were asked to stop, or that another process has told."""
        ...

    async def suggest(self, number: int, attempt: str, name: str, choices: Sequence[str]) -> str:
        """Let the sampler choose one of `choices` for a trial, as a categorical parameter."""
        ...

    async def epoch(self, number: int, epoch: int, metrics: dict[str, float]) -> bool:
        """Record an epoch's metrics; return True if the trial is to be pruned."""
        ...

    def record_steps(self, number: int, attempt: str, device: str, steps: Sequence[StepRecord]) -> None:
        """Record steps of units that are not recorded one by one."""

    def record_checkpoint(self, number: int, step: int, size: int, seconds: float) -> None:
        """Record a checkpoint of `size` bytes that took `seconds` to write."""

    def record_spilled(self, sampled: float, host_bytes: int, disk_bytes: int) -> None:
        """Record the bytes in the spill store."""

    def record_event(self, number: int | None, kind: str, message: str) -> None:
        """Record an event of a trial, or of the study."""
