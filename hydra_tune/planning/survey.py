"""A look at a built candidate before it is trained: what it takes whole, cut or in stages, for one pool or several.

Runs in the worker that has the candidate. A candidate that clearly fits a device and is soon done is only rehearsed;
cutting it open to see what else could be done would take longer than it saves. What user code raises here it raises in
training too, where it is reported: the survey then says nothing, and the candidate is trained whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from hydra_tune.batches import some_rows
from hydra_tune.builds import Prepared
from hydra_tune.candidate import Dataset, Pinned
from hydra_tune.devices import format_bytes
from hydra_tune.engine.clock import work_seconds
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.errors import CandidateError, HydraTuneError, Infeasible
from hydra_tune.graph.placement.links import link
from hydra_tune.pipeline.microbatches import microbatches_for
from hydra_tune.pipeline.prepare import lay_out, most_on_a_device
from hydra_tune.planning import approximate, estimates
from hydra_tune.planning.copies import CannotBeCopied, copied_data
from hydra_tune.planning.estimates import Epoch, Estimate, StagedCosts, refused
from hydra_tune.planning.pool import Pool, Rates
from hydra_tune.planning.rates import calibrate, known_rates
from hydra_tune.planning.rehearsal import Rehearsal
from hydra_tune.planning.rehearsal_cache import rehearsed
from hydra_tune.shards.prepare import PILOT_ROWS, Prospect, examine, recompute, with_evaluation
from hydra_tune.sparse.sizes import layers_of, stages_needed
from hydra_tune.subnets.deal import deal
from hydra_tune.subnets.find import find_structure
from hydra_tune.subnets.shrink import subnet
from hydra_tune.training import Training

STATE_SHARE = 2
"""A model takes at least so many times its parameters in training: gradients come to the weights."""


@dataclass(frozen=True)
class Question:
    """What a survey is to find out."""

    pools: tuple[Pool, ...]
    among: tuple[str, ...]
    soon_done: float = 0.0
    """Seconds of training below which nothing but the plain loop is looked into, where that fits; where it does not,
    nothing but shards."""
    insist: bool = True
    """Whether a candidate that cannot be rehearsed is looked into all the same, with its own loss and metrics."""


@dataclass(frozen=True)
class Survey:
    """What was found, for each pool that was asked for."""

    estimates: tuple[tuple[Estimate, ...], ...]
    epochs: int
    batches: int
    seconds: float
    """That the survey took."""
    failed: str = ""
    """What came in the way, where it says nothing."""
    stays: bool = False
    """Whether the candidate cannot be sent to another process: only a device that builds it can train it."""


def survey(context: WorkerContext, attempt: str, seed: int, profiles: Path, question: Question) -> Survey:
    """Look at the candidate that was built here."""
    prepared: Prepared = context.resident[attempt]
    began = time.perf_counter()
    candidate = prepared.candidate
    look = _Look(context, prepared, seed, profiles, question)
    try:
        found = look.at_everything()
    except Exception as error:  # noqa: BLE001 - user code runs here; training meets the same, and reports it
        found, look.failed = tuple(() for _ in question.pools), f"{type(error).__name__}: {error}"
    candidate.model.zero_grad(set_to_none=True)
    batches = look.epoch.batches if look.epoch is not None else 0
    return Survey(found, candidate.epochs, batches, time.perf_counter() - began, look.failed, look.stays)


class _Look:
    """One candidate, looked at as closely as the question needs."""

    def __init__(
        self, context: WorkerContext, prepared: Prepared, seed: int, profiles: Path, question: Question
    ) -> None:
        self.context = context
        self.prepared = prepared
        self.seed = seed
        self.profiles = profiles
        self.question = question
        self.epoch: Epoch | None = None
        self._prospect: Prospect | None = None
        self._rates: Rates | None = None
        self.failed = ""
        """Why the candidate could not be rehearsed."""
        self.stays = False

    def at_everything(self) -> tuple[tuple[Estimate, ...], ...]:
        question, prepared = self.question, self.prepared
        if isinstance(prepared.train, Pinned):
            raise CandidateError("its data is pinned to partitions", "use strategy ist with data: pinned")
        train, valid = self._data()
        self.training = Training(prepared.candidate, train, valid, self.seed, torch.device("cpu"))
        self.epoch = _epoch_of(self.training)
        self.parameter_bytes = sum(p.numel() * p.element_size() for p in prepared.candidate.model.parameters())
        self.fetch_seconds = self._fetch_seconds()
        largest = max(pool.memory for pool in question.pools)
        self.rehearsal = self._rehearsed() if self._may_fit(largest) else None
        if self.failed and not question.insist:
            return tuple(() for _ in question.pools)
        return tuple(tuple(self._tried(name, pool) for name in question.among) for pool in question.pools)

    def _data(self) -> tuple[Dataset, Dataset | None]:
        """To look at: what it draws and counts is not drawn and counted in training."""
        try:
            return copied_data(self.prepared.train), copied_data(self.prepared.valid)
        except CannotBeCopied:
            if not self.question.insist:
                raise  # trained as it is, without a look
            return self.prepared.train, self.prepared.valid

    def _tried(self, name: str, pool: Pool) -> Estimate:
        """A strategy that cannot even be estimated takes nothing from the others."""
        try:
            return self._of(name, pool)
        except Exception as error:  # noqa: BLE001 - user code runs here
            return refused(name, f"it could not be looked into ({type(error).__name__}: {error})")

    def _may_fit(self, memory: int) -> bool:
        """Whether it is worth a rehearsal: what cannot fit is cut open at once, and the host must bear a copy."""
        bearable = 6 * self.parameter_bytes < psutil.virtual_memory().available
        return STATE_SHARE * self.parameter_bytes <= memory and bearable

    def _rehearsed(self) -> Rehearsal | None:
        try:
            return rehearsed(self.prepared, self.training.batches, self.seed, torch.device("cpu"), self.profiles)
        except CannotBeCopied as error:
            self.failed, self.stays = str(error), True
        except Exception as error:  # noqa: BLE001 - user code runs here
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
        if name == "whole":
            return self._whole(pool)
        if "whole" in self.question.among and self._soon_done(self._whole(pool)):
            return refused(name, "not looked into: it fits a device, and is soon done")
        if name == "pipeline" and "shard" in self.question.among and self._soon_done(self._shard(pool)):
            return refused(name, "not looked into: in shards it is soon done")
        match name:
            case "shard":
                return self._shard(pool)
            case "pipeline":
                return self._pipeline(pool)
            case _:
                return self._approximate(name, pool)

    def _soon_done(self, estimate: Estimate) -> bool:
        seconds = estimate.seconds * self.prepared.candidate.epochs
        return not estimate.refused and seconds < self.question.soon_done

    def _whole(self, pool: Pool) -> Estimate:
        assert self.epoch is not None
        if self.failed:
            return refused("whole", f"trying it out failed ({self.failed})")
        if self.rehearsal is None:
            least, there = format_bytes(STATE_SHARE * self.parameter_bytes), format_bytes(pool.memory)
            return refused("whole", f"needs at least {least} on a device of {there}")
        return estimates.whole(self.rehearsal, self.epoch, pool)

    @property
    def prospect(self) -> Prospect:
        if self._prospect is None:
            self._prospect = examine(self.training, self.profiles)
        return self._prospect

    @property
    def rates(self) -> Rates:
        """This machine's; measured here where nobody has yet."""
        if self._rates is None:
            setup = self.context.setup
            try:
                self._rates = known_rates() or calibrate(
                    Path(setup.directory), Path((setup.directory, *setup.overflow)[-1])
                )
            except OSError:  # no room to measure in: a guess will do to choose by, and training says what it lacks
                self._rates = Rates()
        return self._rates

    def _shard(self, pool: Pool) -> Estimate:
        assert self.epoch is not None
        try:
            costs = self.prospect.shards(pool.memory)
        except Infeasible as error:
            why = self.prospect.captured.whole_because
            return refused(
                "shard", f"{error}; it cannot be cut: {why}" if why else str(error),
                smallest_budget=error.smallest_budget,
            )  # fmt: skip
        again = sorted(recompute(costs, pool.memory))
        nodes = sum(node.seconds for node in self.prospect.profile.nodes)
        pace = 1.0
        if self.rehearsal is not None and nodes:
            pace = min(1.0, max(0.1, (self.rehearsal.batch_seconds - self.fetch_seconds) / nodes))
        return estimates.shard(costs, again, self.epoch, pool, self.rates, fetch_seconds=self.fetch_seconds, pace=pace)

    def _pipeline(self, pool: Pool) -> Estimate:
        assert self.epoch is not None
        if pool.devices == 1:
            return refused("pipeline", "there is one device, and stages want several")
        try:
            count, warning = microbatches_for(self.training, None, pool.devices)
            if count == 1:
                return refused("pipeline", f"only {warning or 'one row a batch'}; all devices but one would wait")
            staged = self._staged(pool, count)
        except HydraTuneError as error:  # no room on the devices, or a loss that cannot be taken apart
            return refused("pipeline", str(error))
        return estimates.pipeline(staged, self.epoch, pool, fetch_seconds=self.fetch_seconds)

    def _staged(self, pool: Pool, count: int) -> StagedCosts:
        rows = -(-self.training.batches.rows_at(0) // count)
        prospect = with_evaluation(examine(self.training, self.profiles, rows), self.training, rows)
        way = link(self.profiles, Path(self.context.setup.directory).parent).seconds
        laid = lay_out(prospect, pool.devices, [pool.memory] * pool.devices, count, "1f1b", "best", way)
        made_on = {value: stage.device for stage in laid.stages for value in stage.gives}
        crossing = {
            (value, stage.device)
            for stage in laid.stages
            for value in stage.takes
            if made_on.get(value, stage.device) != stage.device
        }
        steps = sum(stage.step_seconds for stage in laid.stages)
        return StagedCosts(
            step_seconds=laid.prediction.seconds, busy_seconds=sum(laid.prediction.busy) + steps,
            forward_seconds=sum(stage.forward_seconds for stage in laid.stages), microbatches=count,
            stages=len(laid.stages), device_bytes=most_on_a_device(laid.stages, pool.devices, "1f1b", count),
            boundary_bytes=sum(prospect.profile.value_bytes.get(value, 0) for value, _ in crossing),
        )  # fmt: skip

    def _approximate(self, name: str, pool: Pool) -> Estimate:
        assert self.epoch is not None
        if name == "sparse":
            return self._sparse(pool)
        if self.rehearsal is None:
            why = f"trying it out failed ({self.failed})" if self.failed else "the model is too large to be tried out"
            return refused(name, why)
        rates = self.rates
        if name == "elastic":
            return approximate.elastic(self.rehearsal, self.parameter_bytes, self.epoch, pool, rates)
        try:
            share = self._subnet_share(max(2, pool.devices))
        except CandidateError as error:
            return refused("ist", str(error))
        return approximate.ist(self.rehearsal, share, self.parameter_bytes, self.epoch, pool, rates)

    def _sparse(self, pool: Pool) -> Estimate:
        """As replicas where a device holds the dense network; where not, how many stages it would take."""
        assert self.epoch is not None
        if self.rehearsal is not None and self.rehearsal.peak_bytes <= pool.memory:
            return approximate.sparse(self.rehearsal, self.parameter_bytes, self.epoch, pool, self.rates)
        sparsity = self.prepared.candidate.sparsity
        layers = layers_of(self.prepared.candidate.model, approximate.SPARSITY if sparsity is None else sparsity)
        needed = stages_needed(self.prospect, layers, pool.memory, mixed=True, microbatches=1)
        return refused("sparse", approximate.instead_of_replicas(needed.pruned, needed.dense, pool))

    def _subnet_share(self, subnets: int) -> float:
        model = self.prepared.candidate.model
        if len(self.training.batches) < subnets:
            raise CandidateError(
                f"an epoch has {len(self.training.batches)} batches, fewer than {subnets} subnets", "use smaller ones"
            )
        inputs, _targets = self.training.batches.fetch(0, 0)
        pilot = some_rows(inputs, self.training.batches.rows_at(0), 0, PILOT_ROWS)
        structure = find_structure(model, pilot, subnets, "auto")
        tensors = self.training.named_tensors()
        parts = [subnet(model, structure, dealt, tensors) for dealt in deal(structure, subnets, seed=0, turn=0)]
        largest = max(sum(p.numel() for p in part.parameters()) for part in parts)
        return largest / max(1, sum(p.numel() for p in model.parameters()))


def _epoch_of(training: Training) -> Epoch:
    found = Epoch(batches=len(training.batches), rows=training.batches.rows_at(0))
    if training.valid is None:
        return found
    return replace(found, valid_batches=len(training.valid), valid_rows=training.valid.rows)
