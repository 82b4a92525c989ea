"""How long a whole search would take, from the plans of some of its trials: pure, on a virtual clock.

Trials begin in the order in which they are asked for, each on the first device that is free. When the last one is
alone, it is spread over the devices if its plan knows a quicker way on several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import cycle, islice

from hydra_tune.planning.choice import Choice, Situation, choose
from hydra_tune.planning.estimates import Estimate
from hydra_tune.planning.pool import Pool

MOVE_SECONDS = 3.0
"""To bring a trial in training from one strategy to another."""


@dataclass(frozen=True)
class Job:
    """A trial to come."""

    seconds: float
    """With one device, or as many as its strategy takes, to itself."""
    spread: float
    """With all devices to itself; the same where there is no quicker way."""
    work: float
    """Summed over devices."""


@dataclass(frozen=True)
class Outlook:
    """What a search on a pool would take."""

    pool: Pool
    makespan: float
    bound: float
    """No schedule is shorter: the longest trial on all devices, or all work shared out evenly."""
    infeasible: int
    """Of the trials that were looked at, those that no strategy can train."""


def outlook(plans: Sequence[Sequence[Estimate]], epochs: Sequence[int], pool: Pool, trials: int) -> Outlook:
    """Of a search of so many trials, that are all like those whose estimates are given."""
    jobs = []
    for estimates, count in zip(plans, epochs, strict=True):
        busy = choose(estimates, Situation(pool, min(trials, pool.devices + 1), count))
        alone = choose(estimates, Situation(pool, 1, count))
        if busy is not None and alone is not None:
            jobs.append(Job(busy.seconds, min(busy.seconds, alone.seconds), _work(busy)))
    infeasible = len(plans) - len(jobs)
    some = list(islice(cycle(jobs), max(1, round(trials * len(jobs) / len(plans))))) if jobs else []
    return Outlook(pool, makespan(some, pool.devices), bound(some, pool.devices), infeasible)


def makespan(jobs: Sequence[Job], devices: int) -> float:
    """Until the last of the jobs has ended."""
    free = [(0.0, -1)] * devices
    heapify(free)
    for number, job in enumerate(jobs):
        heapreplace(free, (free[0][0] + job.seconds, number))
    (end, last), *others = sorted(free, reverse=True)
    if last < 0 or not others:
        return end
    alone = end - others[0][0]
    job = jobs[last]
    return min(end, others[0][0] + MOVE_SECONDS + alone * job.spread / job.seconds) if job.seconds else end


def bound(jobs: Sequence[Job], devices: int) -> float:
    """No schedule is shorter."""
    return max([sum(job.work for job in jobs) / devices, *(job.spread for job in jobs)])


def _work(choice: Choice) -> float:
    return choice.epochs * choice.estimate.work
