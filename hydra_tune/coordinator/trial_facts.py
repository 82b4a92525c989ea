"""Measurements of a trial during training, recorded at its end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hydra_tune.engine.unit import Role, Unit, UnitResult


@dataclass
class TrialFacts:
    """Measurements and records of a trial, over all its attempts."""

    seconds: float = 0.0
    peak_device_bytes: int | None = None
    device: str = ""
    trained: bool = False
    """True once the trial is known to be a candidate, which has weights and checkpoints."""
    retried: bool = False
    """True if an attempt of the trial was lost or failed in this search."""
    checkpoints: int = 0
    strategy: str = ""
    shards: int = 1
    plan: dict[str, Any] | None = None
    choice: dict[str, Any] | None = None
    """The choice of the strategy as plain data: its reason, its estimate and the alternatives."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """Earlier choices of a trial that changed its strategy."""
    read_bytes: int = 0
    """Bytes read from the spill store."""
    written_bytes: int = 0
    spilled_bytes: int | None = None
    """Peak bytes seen in the spill store."""
    communicated_bytes: int = 0

    def stored(self) -> dict[str, Any]:
        """Return the columns of the trial's row that these facts fill."""
        return {
            "seconds": self.seconds, "device": self.device, "peak_device_bytes": self.peak_device_bytes,
            "strategy": self.strategy, "shards": self.shards, "communicated_bytes": self.communicated_bytes,
            "spill_read_bytes": self.read_bytes, "spill_written_bytes": self.written_bytes,
            "spilled_bytes": self.spilled_bytes, "plan": self._stored_plan(),
        }  # fmt: skip

    def _stored_plan(self) -> str | None:
        """Return the plan and its choice as JSON text."""
        if self.choice is None:
            return None if self.plan is None else json.dumps(self.plan)
        measured: dict[str, Any] = {"measured_device_bytes": self.peak_device_bytes}
        if self.earlier:
            measured["earlier"] = self.earlier
        return json.dumps({**(self.plan or {}), "choice": {**self.choice, **measured}})

    def chosen(self, strategy: str, choice: dict[str, Any]) -> None:
        """Record the trial's new strategy, and keep the earlier choice, if any."""
        if self.choice is not None:
            self.earlier.append(self.choice)
        self.strategy, self.choice = strategy, choice

    def took(self, batch_seconds: float) -> None:
        """Record the measured seconds of a batch by the chosen strategy."""
        assert self.choice is not None
        self.choice["measured_batch_ms"] = 1000 * batch_seconds
        self.choice["time_error"] = 1000 * batch_seconds / self.choice["predicted_batch_ms"] - 1

    def saw_spilled(self, size: int) -> None:
        """Update the peak with the bytes now in the spill store."""
        self.spilled_bytes = max(self.spilled_bytes or 0, size)

    def add(self, unit: Unit, result: UnitResult, sharers: int = 1) -> None:
        """Add the time and memory of a unit; one that trains several trials as one counts a share for each."""
        if unit.role is Role.DEVICE:
            self.seconds += result.seconds / sharers
            self.device = result.device
        if result.peak_bytes is not None:
            self.peak_device_bytes = max(self.peak_device_bytes or 0, result.peak_bytes)
