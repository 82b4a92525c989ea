"""Estimates the time of a whole search from the plans of some of its trials: pure, on a virtual clock.

Trials begin in order, each on the first free device. When the last one is alone, it is spread over the devices if its
plan has a faster way on several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import cycle, islice

from hydra_tune.planner.choice import Choice, Situation, choose
from hydra_tune.strategies.estimate import Estimate
from hydra_tune.strategies.pool import Pool

MOVE_SECONDS = 3.0
"""Seconds to move a trial in training from one strategy to another."""


@dataclass(frozen=True)
class Job:
    """A trial to come."""

    seconds: float
    """Seconds alone on one device, or on as many as its strategy takes."""
    spread: float
    """Seconds alone on all devices; the same if there is no faster way."""
    work: float
    """Seconds of work summed over devices."""


@dataclass(frozen=True)
class SearchTime:
    """Estimated times of a search on a pool, in seconds."""

    pool: Pool
    makespan: float
    bound: float
    """Lower bound of any schedule in seconds: the longest trial on all devices, or all work shared evenly."""
    infeasible: int
    """Number of surveyed trials that no strategy can train."""


def search_time(plans: Sequence[Sequence[Estimate]], epochs: Sequence[int], pool: Pool, trials: int) -> SearchTime:
    """Estimate a search of `trials` trials that are all like those with the given estimates."""
    jobs = []
    for estimates, count in zip(plans, epochs, strict=True):
        busy = choose(estimates, Situation(pool, min(trials, pool.devices + 1), count, trials))
        alone = choose(estimates, Situation(pool, 1, count))
        if busy is not None and alone is not None:
            seconds = _work(busy) if busy.estimate.members > 1 else busy.seconds
            jobs.append(Job(seconds, min(seconds, alone.seconds), _work(busy)))
    infeasible = len(plans) - len(jobs)
    some = list(islice(cycle(jobs), max(1, round(trials * len(jobs) / len(plans))))) if jobs else []
    return SearchTime(pool, makespan(some, pool.devices), bound(some, pool.devices), infeasible)


def makespan(jobs: Sequence[Job], devices: int) -> float:
    """Return the seconds until the last of the jobs has ended."""
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
    """Return the lower bound of any schedule in seconds."""
    return max([sum(job.work for job in jobs) / devices, *(job.spread for job in jobs)])


def _work(choice: Choice) -> float:
    return choice.epochs * choice.estimate.work
