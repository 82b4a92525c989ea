"""Batches of a torch DataLoader by position, with its own order, collate function and workers.

A DataLoader iterates over whole epochs, but another process may resume a trial amid an epoch. So each epoch's batches
are planned first, as lists of rows from the loader's own sampler, and fetched from any position on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from hydra_tune.core.errors import CandidateError
from hydra_tune.core.random_state import RandomState
from hydra_tune.core.seeds import seed_everything
from hydra_tune.training.batches import Batches, epoch_seed
from hydra_tune.training.candidate import Candidate

Plan = list[list[int]]


class LoaderBatches(Batches):
    """The batches of a `LoaderData`."""

    data: LoaderData

    def __init__(self, candidate: Candidate, data: LoaderData, *, training: bool, seed: int = 0) -> None:
        self.data = data
        self.loader = data.loader
        self.seed = seed
        self._planned: tuple[int, Plan] | None = None
        self._began = [(0, data.generator)]
        """State of the loader's own generator at the beginning of epochs."""
        self._feed: tuple[int, int, Iterator[Any]] | None = None
        plan = self._plan(0)
        self.rows, self.size, self.count = sum(map(len, plan)), max(map(len, plan), default=1), len(plan)

    def rows_at(self, position: int) -> int:
        return len(self._plan(None)[position])

    def fetch(self, epoch: int, position: int) -> tuple[Any, Any]:
        plan = self._plan(epoch)
        batch = self._fed(epoch, position, plan) if self.loader.num_workers else self._made(plan[position])
        return self.data.split(batch, position)

    def first(self) -> Any:
        """Return the first batch in the loader's form, made in this process, for inspection."""
        return self._made(self._plan(0)[0])

    def _made(self, rows: list[int]) -> Any:
        dataset = self.loader.dataset
        many = getattr(dataset, "__getitems__", None)
        return self.loader.collate_fn(many(rows) if callable(many) else [dataset[row] for row in rows])

    def _fed(self, epoch: int, position: int, plan: Plan) -> Any:
        """Return the batch from the loader's workers, which continue from batch to batch."""
        if self._feed is None or self._feed[:2] != (epoch, position):
            self._feed = epoch, position, self._workers(epoch, plan[position:])
        _, _, batches = self._feed
        batch = next(batches)
        self._feed = (epoch, position + 1, batches) if position + 1 < len(plan) else None
        return batch

    def _workers(self, epoch: int, plan: Plan) -> Iterator[Any]:
        loader = self.loader
        feeding: DataLoader[Any] = DataLoader(
            loader.dataset, batch_sampler=plan, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
            timeout=loader.timeout, worker_init_fn=loader.worker_init_fn, prefetch_factor=loader.prefetch_factor,
            multiprocessing_context=loader.multiprocessing_context,
            # Not drawn from the trial's random stream, which training continues with.
            generator=torch.Generator().manual_seed(epoch_seed(self.seed, epoch)),
        )  # fmt: skip
        return iter(feeding)

    def _plan(self, epoch: int | None) -> Plan:
        """Return the rows of each batch of an epoch; by default the current one."""
        if self._planned is None or epoch not in (None, self._planned[0]):
            self._planned = epoch or 0, self._drawn(epoch or 0)
        return self._planned[1]

    def _drawn(self, epoch: int) -> Plan:
        sampler = self.loader.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        generator = generator_of(self.loader)
        if generator is not None:
            return self._drawn_from(generator, epoch)
        streams = RandomState.capture()
        try:
            seed_everything(epoch_seed(self.seed, epoch) % 2**32)
            return self._sampled()
        finally:
            streams.restore()

    def _drawn_from(self, generator: torch.Generator, epoch: int) -> Plan:
        """Return an epoch's plan by the loader's own generator, whose state is restored afterwards."""
        stood = generator.get_state()
        try:
            first, state = next(known for known in reversed(self._began) if known[0] <= epoch)
            generator.set_state(state)
            plan: Plan = []
            for each in range(first, epoch + 1):
                # As the loader does at the start of an epoch: draw a seed for its workers, then sample.
                if self.loader.generator is not None:
                    torch.empty((), dtype=torch.int64).random_(generator=generator)
                plan = self._sampled()
                if each == self._began[-1][0]:
                    self._began.append((each + 1, generator.get_state()))
            return plan
        finally:
            generator.set_state(stood)

    def _sampled(self) -> Plan:
        assert self.loader.batch_sampler is not None, "`LoaderData.of` refuses a loader without"
        return [list(rows) for rows in self.loader.batch_sampler]


def generator_of(loader: DataLoader[Any]) -> torch.Generator | None:
    """Return the generator of a loader's order; None if the process's own stream is used."""
    found = loader.generator or getattr(loader.sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


@dataclass(frozen=True)
class LoaderData:
    """A DataLoader as a candidate's data; `split(batch, position)` returns inputs and targets of a batch."""

    loader: DataLoader[Any]
    split: Callable[[Any, int], tuple[Any, Any]]
    generator: Any = None
    """State of the loader's own generator at the beginning; None without one."""

    batches: ClassVar[type[Batches]] = LoaderBatches

    @classmethod
    def of(cls, loader: Any, split: Callable[[Any, int], tuple[Any, Any]], what: str) -> LoaderData:
        """Check a loader; refuse kinds that cannot be resumed at any batch."""
        if not isinstance(loader, DataLoader):
            raise CandidateError(f"{what} is a {type(loader).__name__}", "give one torch DataLoader")
        if isinstance(loader.dataset, IterableDataset):
            raise CandidateError(f"{what} has an IterableDataset", "give one with a map-style dataset")
        if loader.batch_sampler is None:
            raise CandidateError(f"{what} makes no batches", "give it a batch_size")
        generator = generator_of(loader)
        return cls(loader, split, None if generator is None else generator.get_state())

    def __len__(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def __getitem__(self, row: int) -> Any:
        return self.loader.dataset[row]
