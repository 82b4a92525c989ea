"""Records a study's units, its steps and its late results, on the study's thread."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_tune.engine.unit import StepRecord, Unit, UnitResult
from hydra_tune.storage.records import StudyRecords


class WorkRecords:
    """Translates units and their results into the study's records."""

    def __init__(self, records: StudyRecords) -> None:
        self.records = records

    def unit(self, unit: Unit, result: UnitResult) -> None:
        """Record a unit, or its steps if it has any."""
        if not result.steps:
            kind = f"{unit.kind} {len(unit.members)} as one" if unit.members else unit.kind
            self.records.unit(
                unit.trial, unit.attempt, kind, result.device, result.started, result.seconds, result.peak_bytes
            )
        self.steps(unit.trial, unit.attempt, result.device, result.peak_bytes, result.steps)

    def steps(
        self, number: int, attempt: str, device: str, peak_bytes: int | None, steps: Sequence[StepRecord]
    ) -> None:
        """Record steps of a trial on a device."""
        for step in steps:
            self.records.unit(
                number, attempt, step.kind, device, step.started, step.seconds, peak_bytes,
                shard=step.shard, read_bytes=step.read_bytes, written_bytes=step.written_bytes, steps=step.count,
            )  # fmt: skip

    def late_result(self, unit: Unit, device: str) -> None:
        self.records.event(unit.trial, "refused", f"a late result of attempt {unit.attempt} ({unit.kind}) on {device}")
