"""Strategy `ist`: independent subnets of one model, trained apart on any devices and merged every few steps.

After arXiv 1910.02120 and 2107.00961. In every round the neurons, filters, heads or residual blocks of the model are
dealt out to subnets, and each subnet trains its own on batches of its own; subnets share only weights that cannot be
dealt out, which are averaged. A subnet out of n has between 1/n and 1/n² of the weights, which bounds the memory of a
device and the bytes communicated. The result equals that of a plain loop only with one subnet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hydra_tune.core.errors import CandidateError, SpecError, nearest, quoted
from hydra_tune.core.tables import Table
from hydra_tune.strategies.base import Strategy, TrialRun
from hydra_tune.strategies.epochs import train_epochs
from hydra_tune.strategies.estimate import Estimate, Look
from hydra_tune.strategies.pool import Pool
from hydra_tune.strategies.subnets import plan_table
from hydra_tune.strategies.subnets.rounds import InRounds
from hydra_tune.strategies.subnets.work import DEALS, SubnetRequest

LEAST_SUBNETS = 2


@dataclass(frozen=True)
class Ist(Strategy):
    """Train independent subnets."""

    name = "ist"
    exact = False
    summary = "independent subnets of one model on any devices, put together every few steps"
    builds_apart = True
    spans_devices = True

    subnets: int | None = None
    """Number of subnets; by default one per device, and at least two."""
    local_steps: int = 20
    """Optimizer steps of each subnet in a round."""
    deal: str = "auto"
    """width: neurons, filters and heads; depth: residual blocks; auto: depth if there are at least as many blocks as
    subnets."""
    optimizer_state: str = "travel"
    """travel: momentum and other state moves with its weights; reset: every round starts without."""
    data: str = "shared"
    """shared: the batches of an epoch are dealt out; pinned: each subnet has one partition of a `Pinned` data set."""
    lost: str = "rerun"
    """Handling of a subnet whose device is lost: rerun, or skip for the round."""

    def __post_init__(self) -> None:
        for name, least in (("subnets", 1), ("local_steps", 1)):
            check_count(name, getattr(self, name), least, optional=name == "subnets")
        for name, known in (("deal", DEALS), ("optimizer_state", ("travel", "reset")), ("lost", ("rerun", "skip"))):
            check_choice(name, getattr(self, name), known)
        check_choice("data", self.data, ("shared", "pinned"))

    def trials_at_once(self, devices: int) -> int:
        """Return enough trials to keep all devices busy, plus one for the time in which results are merged."""
        return -(-devices // (self.subnets or max(devices, LEAST_SUBNETS))) + 1

    @classmethod
    def estimate(cls, look: Look, pool: Pool) -> Estimate:
        from hydra_tune.strategies.subnets.estimate import estimate  # imports torch, so only in workers

        return estimate(look, pool)

    @classmethod
    def describe_plan(cls, plan: Mapping[str, Any]) -> Iterable[str | Table]:
        return plan_table.describe(plan)

    async def train(self, run: TrialRun) -> None:
        pinned = self.data == "pinned"
        if pinned and not run.blueprint.partitions:
            raise CandidateError(
                "data is 'pinned', and Candidate.train is no ht.Pinned",
                "give train=ht.Pinned(...) a function for each subnet, or leave data at 'shared'",
            )
        subnets = self.subnets or (run.blueprint.partitions if pinned else max(len(run.engine.devices), LEAST_SUBNETS))
        if pinned and run.blueprint.partitions != subnets:
            raise CandidateError(
                f"there are {subnets} subnets, and Candidate.train has {run.blueprint.partitions} pinned partitions",
                "give train=ht.Pinned(...) a function for each subnet",
            )
        wanted = SubnetRequest(subnets, self.local_steps, self.optimizer_state == "travel", self.deal, pinned=pinned)
        candidate = await InRounds.laid_out(run, wanted, skips=self.lost == "skip")
        self._note_plan(run, candidate)
        await run.restored(candidate.history, candidate.laid.notes)
        try:
            await train_epochs(run, candidate)
        finally:
            self._note_plan(run, candidate)

    def _note_plan(self, run: TrialRun, candidate: InRounds) -> None:
        laid = candidate.laid
        plan: dict[str, Any] = {
            "subnets": candidate.wanted.subnets, "local_steps": self.local_steps, "dealt": laid.dealt,
            "parameters": laid.parameters, "subnet_parameters": laid.subnet_parameters,
            "optimizer_state": self.optimizer_state, "epochs": candidate.account,
        }  # fmt: skip
        run.planned(self.name, candidate.wanted.subnets, plan=plan)


def check_count(name: str, value: object, least: int, *, optional: bool = False) -> None:
    """Raise SpecError unless `value` is a whole number of at least `least`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{name} cannot be {quoted(value)}", f"give a whole number from {least} on")


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise SpecError unless `value` is one of the known names."""
    if value not in known:
        raise SpecError(f"{name} cannot be {quoted(value)}", nearest(str(value), known))
