"""A member of a pack: the plain training of one candidate, whose tensors may lie in a pack's memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hydra_tune.core.random_state import RandomState
from hydra_tune.strategies.pack.batches import is_plain
from hydra_tune.training.loop import Training
from hydra_tune.training.progress import Progress

if TYPE_CHECKING:
    from hydra_tune.strategies.pack.pack import Pack
    from hydra_tune.training.prepared import Prepared


class Member(Training):
    """A candidate in training that joins and leaves packs; alone it trains by the plain loop."""

    pack: Pack | None = None

    @classmethod
    def of(cls, prepared: Prepared, device: torch.device, seed: int = 0) -> Member:
        """Return a member that begins."""
        return cls(prepared.candidate, prepared.train, prepared.valid, seed, device)

    def leave(self) -> None:
        """Leave the pack, with tensors of its own."""
        if self.pack is not None:
            self.pack.release(self)

    def train_for(self, seconds: float) -> Progress:
        self.leave()
        return super().train_for(seconds)

    def end_epoch(self) -> dict[str, float]:
        self.leave()
        return super().end_epoch()

    def state(self) -> dict[str, Any]:
        if self.pack is not None:
            self.pack.settle(self)
        return super().state()

    def save(self, path: Path) -> None:
        self.leave()
        super().save(path)

    def close(self) -> None:
        """Leave without taking the tensors along: the trial has ended here."""
        if self.pack is not None:
            self.pack.forget(self)

    def draws_in_data(self) -> bool:
        """True if code of the user makes the batches, which may draw random numbers."""
        return not (is_plain(self.batches) and (self.valid is None or is_plain(self.valid)))

    @property
    def random(self) -> RandomState:
        """The state of the trial's random streams."""
        return self._random

    @property
    def valid_shape(self) -> tuple[int, int, int] | None:
        """Rows, batch size and batches of the validation data."""
        return None if self.valid is None else (self.valid.rows, self.valid.size, len(self.valid))

    def stepped(self) -> None:
        if self.pack is not None:
            vars(self.optimizer)["_opt_called"] = True  # schedules warn without it
        super().stepped()

    def next_with(self, sums: dict[str, float] | None) -> dict[str, float]:
        """Advance to the next epoch, with sums of metrics or, without, by an evaluation alone; return every metric."""
        if sums is None and self.pack is not None:
            self.pack.settle(self)
        metrics = self.with_train_loss(self.evaluate() if sums is None else self.mean_metrics(sums))
        self.next_epoch(metrics)
        return metrics
