"""m-SCT (Baechi, arXiv 2301.08695): small communication times, with a favourite child for each node.

A linear program (Hanen and Munier, Discrete Applied Mathematics 108, 2001) decides which consumer of a node should run
right after it on its device: in its relaxation every node keeps at most one child near, and every child at most one
parent, and the others pay for the transfer. If r, the longest transfer in units of the shortest node, is at most 1, its
value is a lower bound of the makespan, and their schedule is within 1 + (1 - 1/devices)·2(1 + r)/(2 + r) of the
optimum. Then nodes are launched as in m-ETF, but a device that has just run a node waits for its favourite child, if
that can start nowhere sooner, and meanwhile takes only urgent nodes: those whose inputs are on every device already.
This waiting differs from theirs: the bound is tested, not proven.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from hydra_tune.graph.placement.etf import Launcher, Queue, Start
from hydra_tune.graph.placement.problem import Problem

logger = logging.getLogger(__name__)

NEAR = 0.5
"""Edges with at most this value in the relaxed solution are kept near, that is on one device."""
NOBODY = -1


class Relaxation(NamedTuple):
    """The solution of the linear program."""

    makespan: float
    """Makespan with unlimited devices: a lower bound of the makespan if no transfer takes longer than any node."""
    far: dict[tuple[int, int], float]
    """Distance of each edge: 0 is near, 1 pays the whole transfer."""


def relax(problem: Problem) -> Relaxation | None:
    """Solve the linear program; None if the solver fails."""
    edges = [(u, v, seconds) for u, after in enumerate(problem.after) for v, seconds in after]
    count, links = len(problem.nodes), len(edges)
    times = np.array(problem.times, dtype=float)
    # In other units the solver's tolerances have reported feasible programs as infeasible.
    scale = float(times.mean()) or max((seconds for _, _, seconds in edges), default=0.0) or 1.0
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    bounds: list[float] = []

    def at_most(bound: float, *terms: tuple[int, float]) -> None:
        for column, value in terms:
            rows.append(len(bounds))
            columns.append(column)
            values.append(value)
        bounds.append(bound)

    # Columns: the distance of each edge, then the start of each node, then the makespan.
    outgoing: list[list[int]] = [[] for _ in range(count)]
    incoming: list[list[int]] = [[] for _ in range(count)]
    for edge, (u, v, seconds) in enumerate(edges):
        outgoing[u].append(edge)
        incoming[v].append(edge)
        at_most(-times[u] / scale, (links + u, 1.0), (links + v, -1.0), (edge, seconds / scale))
    for node in range(count):
        at_most(-times[node] / scale, (links + node, 1.0), (links + count, -1.0))
    for around in (*outgoing, *incoming):
        if len(around) > 1:
            at_most(1.0 - len(around), *((edge, -1.0) for edge in around))
    objective = np.zeros(links + count + 1)
    objective[-1] = 1.0
    limits = np.zeros((links + count + 1, 2))
    limits[:links, 1], limits[links:, 1] = 1.0, np.inf
    from scipy.optimize import linprog  # slow to import, and most candidates are never placed
    from scipy.sparse import csr_array

    matrix = csr_array((values, (rows, columns)), shape=(len(bounds), links + count + 1))
    solved = linprog(objective, A_ub=matrix, b_ub=bounds, bounds=limits, method="highs-ds")
    if solved.x is None:
        logger.warning("the linear program of m-SCT was not solved (%s): no node has a favourite child", solved.message)
        return None
    far = {(u, v): float(solved.x[edge]) for edge, (u, v, _) in enumerate(edges)}
    return Relaxation(float(solved.fun) * scale, far)


def favourite_children(problem: Problem) -> list[int]:
    """Return the favourite child of each node, or NOBODY: a matching, the nearest edges first."""
    favourite = [NOBODY] * len(problem.nodes)
    relaxed = relax(problem) if len(problem.capacity) > 1 and any(problem.after) else None
    taken = set()
    for (u, v), far in sorted((relaxed.far if relaxed else {}).items(), key=lambda item: (item[1], item[0])):
        if far <= NEAR and favourite[u] == NOBODY and v not in taken:
            favourite[u] = v
            taken.add(v)
    return favourite


class _WaitingLauncher(Launcher):
    """A launcher whose devices wait for favourite children."""

    def __init__(self, problem: Problem, favourite: list[int]) -> None:
        super().__init__(problem, range(len(problem.nodes)))
        self._favourite = favourite
        self._last = [NOBODY] * len(problem.capacity)
        self._urgent = [Queue() for _ in problem.devices]

    def first(self, device: int) -> Start | None:
        child = self._awaited(device)
        if child is None:
            return super().first(device)
        now = self.clock.free[device]
        urgent = self._urgent[device].first(now, lambda node: self._everywhere(node, device))
        return urgent if urgent is not None and urgent.time <= now else child

    def launch(self, node: int, device: int) -> None:
        self._last[device] = node
        super().launch(node, device)

    def ready(self, node: int) -> None:
        super().ready(node)
        arrivals = {d: at for d in self.problem.devices if (at := self.arrival(node, d)) is not None}
        for device in arrivals:
            self._urgent[device].add(max(arrivals.values()), self.rank[node], node)

    def _awaited(self, device: int) -> Start | None:
        """Return the start of the favourite child of the last node, if it is ready and starts nowhere sooner."""
        child = self._favourite[self._last[device]] if self._last[device] != NOBODY else NOBODY
        if child == NOBODY or self.waits[child]:
            return None
        starts = {
            d: max(self.clock.free[d], at) for d in self.problem.devices if (at := self.arrival(child, d)) is not None
        }
        if device not in starts or starts[device] > min(starts.values()):
            return None
        return Start(starts[device], self.rank[child], child)

    def _everywhere(self, node: int, device: int) -> float | None:
        """Return the time when a node's inputs are on every device where it can run; None if it cannot run here."""
        if self.arrival(node, device) is None:
            return None
        return max(at for d in self.problem.devices if (at := self.arrival(node, d)) is not None)


def with_favourites(problem: Problem) -> Launcher:
    """Run m-SCT as far as it gets."""
    launcher = _WaitingLauncher(problem, favourite_children(problem))
    launcher.launch_all()
    return launcher
