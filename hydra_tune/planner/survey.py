"""Survey of a built candidate before training: estimates of each strategy, for one pool or several.

Runs in the worker that has the candidate. A candidate that clearly fits a device and trains briefly is only rehearsed;
cutting it to explore other strategies would take longer than it saves. An error of user code here recurs in training,
where it is reported: the survey then has no estimates, and the candidate is trained whole.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from hydra_tune.core.clock import work_seconds
from hydra_tune.core.errors import CandidateError
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.planner.calibration import calibrate
from hydra_tune.planner.candidate_copies import CannotBeCopied, copied_candidate, copied_data
from hydra_tune.planner.question import Question, Survey
from hydra_tune.planner.rates import known_rates
from hydra_tune.planner.rehearsal_cache import rehearsed
from hydra_tune.strategies.estimate import Epoch, Estimate, Rehearsal, refused
from hydra_tune.strategies.pool import Pool, Rates
from hydra_tune.strategies.registry import find_strategy, known
from hydra_tune.strategies.shard.prepare import Prospect, examine, observe_candidate
from hydra_tune.strategies.whole.estimate import STATE_SHARE
from hydra_tune.training.candidate import Dataset, Pinned
from hydra_tune.training.loop import Training
from hydra_tune.training.prepared import Prepared


def survey(context: WorkerContext, attempt: str, seed: int, profiles: Path, question: Question) -> Survey:
    """Survey the candidate that was built here."""
    prepared: Prepared = context.resident[attempt]
    began = time.perf_counter()
    candidate = prepared.candidate
    look = _Look(context, prepared, seed, profiles, question)
    try:
        found = look.at_everything()
    except Exception as error:  # user code runs here; training meets the same, and reports it
        found, look.failed = tuple(() for _ in question.pools), f"{type(error).__name__}: {error}"
    candidate.model.zero_grad(set_to_none=True)
    return Survey(found, candidate.epochs, look.batches, time.perf_counter() - began, look.failed, look.stays)


class _Look:
    """The survey of one candidate, as detailed as the question needs."""

    def __init__(
        self, context: WorkerContext, prepared: Prepared, seed: int, profiles: Path, question: Question
    ) -> None:
        self.prepared = prepared
        self.directory = Path(context.setup.directory)
        self._spills_to = Path((context.setup.directory, *context.setup.overflow)[-1])
        self.seed = seed
        self.profiles = profiles
        self.question = question
        self._epoch: Epoch | None = None
        self._prospect: Prospect | None = None
        self._observed: Prospect | None = None
        self._rates: Rates | None = None
        self.failed = ""
        """Reason why the candidate could not be rehearsed."""
        self.stays = False

    def at_everything(self) -> tuple[tuple[Estimate, ...], ...]:
        question, prepared = self.question, self.prepared
        if isinstance(prepared.train, Pinned):
            raise CandidateError("its data is pinned to partitions", "use strategy ist with data: pinned")
        train, valid = self._data()
        self.training = Training(prepared.candidate, train, valid, self.seed, torch.device("cpu"))
        self._epoch = _epoch_of(self.training)
        self.parameter_bytes = sum(p.numel() * p.element_size() for p in prepared.candidate.model.parameters())
        self.fetch_seconds = self._fetch_seconds()
        largest = max(pool.memory for pool in question.pools)
        self.rehearsal = self._rehearsed() if self._may_fit(largest) else None
        if self.failed and not question.insist:
            return tuple(() for _ in question.pools)
        return tuple(tuple(self._tried(name, pool) for name in question.among) for pool in question.pools)

    def _data(self) -> tuple[Dataset, Dataset | None]:
        """Return copies of the data, so that the survey does not advance its random streams and counters."""
        try:
            return copied_data(self.prepared.train), copied_data(self.prepared.valid)
        except CannotBeCopied:
            if not self.question.insist:
                raise  # trained directly, without a survey
            return self.prepared.train, self.prepared.valid

    def _tried(self, name: str, pool: Pool) -> Estimate:
        """Return a strategy's estimate; an error refuses this strategy only."""
        try:
            return self._of(name, pool)
        except Exception as error:  # user code runs here
            return refused(name, f"its estimate failed ({type(error).__name__}: {error})")

    def _may_fit(self, memory: int) -> bool:
        """True if a rehearsal is worthwhile: the state may fit a device, and the host has memory for a copy."""
        bearable = 6 * self.parameter_bytes < psutil.virtual_memory().available
        return STATE_SHARE * self.parameter_bytes <= memory and bearable

    def _rehearsed(self) -> Rehearsal | None:
        try:
            return rehearsed(self.prepared, self.training.batches, self.seed, torch.device("cpu"), self.profiles)
        except CannotBeCopied as error:
            self.failed, self.stays = str(error), True
        except Exception as error:  # user code runs here
            self.failed = f"{type(error).__name__}: {error}"
        return None

    def _fetch_seconds(self) -> float:
        found = []
        for _ in range(2):
            began = work_seconds()
            self.training.batches.fetch(0, 0)
            found.append(work_seconds() - began)
        return min(found)

    def _of(self, name: str, pool: Pool) -> Estimate:
        kind = find_strategy(name)
        if kind is None:
            return refused(name, "there is no such strategy")
        for simpler in kind.simpler:
            if simpler in self.question.among and self._soon_done(self._of(simpler, pool)):
                return refused(name, f"not estimated: {known()[simpler].soon_done}")
        return kind.estimate(self, pool)

    def copies(self, count: int) -> list[Prepared]:
        train, valid = self._data()
        candidate = self.prepared.candidate
        return [Prepared(copied_candidate(candidate), train, valid) for _ in range(count)]

    def _soon_done(self, estimate: Estimate) -> bool:
        seconds = estimate.seconds * self.prepared.candidate.epochs
        return not estimate.refused and seconds < self.question.soon_done

    @property
    def epoch(self) -> Epoch:
        assert self._epoch is not None
        return self._epoch

    @property
    def batches(self) -> int:
        """Batches of an epoch; 0 if the survey failed before they were counted."""
        return self._epoch.batches if self._epoch is not None else 0

    @property
    def prospect(self) -> Prospect:
        if self._prospect is None:
            self._prospect = examine(self.training, self.profiles)
        return self._prospect

    @property
    def observed(self) -> Prospect:
        if self._observed is None:
            self._observed = observe_candidate(self.training, self.profiles)
        return self._observed

    @property
    def rates(self) -> Rates:
        """This machine's rates, measured here if necessary."""
        if self._rates is None:
            try:
                self._rates = known_rates() or calibrate(self.directory, self._spills_to)
            except OSError:  # no space to measure in: use a guess, and training reports any lack
                self._rates = Rates()
        return self._rates


def _epoch_of(training: Training) -> Epoch:
    found = Epoch(batches=len(training.batches), rows=training.batches.rows_at(0))
    if training.valid is None:
        return found
    return replace(found, valid_batches=len(training.valid), valid_rows=training.valid.rows)
