"""Decides how much device memory an objective is admitted with; pure.

An objective does not say what it takes. The first trials tell, at their first report or at their end; later ones begin
where as much is free, of the memory of all workers on that device. Until then an accelerator that is shared by several
workers runs one trial, since a trial without memory there would fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_tune.core.devices import Device
from hydra_tune.engine.unit import Memory

MARGIN = 1.1
"""Objectives are taken to need this many times the largest peak that was measured."""
GROWTH = 1.05
"""A peak counts as larger than the last from this factor on."""


class ObjectiveAdmission:
    """Memory of the objectives of one search."""

    def __init__(self, devices: Sequence[Device]) -> None:
        names = [device.torch_device for device in devices]
        self._one_at_first = len(set(names)) < len(names) and names[0] != "cpu"
        self._peak = 0

    @property
    def memory(self) -> Memory:
        """The memory with which a trial is admitted now."""
        size = int(MARGIN * self._peak)
        return Memory(size, size, alone=self._one_at_first and not self._peak, of_device=True)

    def measured(self, peak: int) -> bool:
        """Note a measured peak; return True if it changes what trials are admitted with."""
        if peak <= GROWTH * self._peak:
            return False
        self._peak = peak
        return True
