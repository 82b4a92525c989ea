"""`place`: returns a device and a start for each node of a graph with costs, by one of three placers or the best.

`best` compares the three by simulation, then tries other orders of their placements and a bounded local search
(`improve.py`). The search mostly reaches the optimum on small graphs and rarely improves large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hydra_tune.core.errors import PlacementInfeasible, SpecError, nearest, quoted
from hydra_tune.graph.placement.etf import Launcher, earliest_first, in_good_order
from hydra_tune.graph.placement.fuse import fuse
from hydra_tune.graph.placement.improve import Search
from hydra_tune.graph.placement.memory import Room
from hydra_tune.graph.placement.problem import Edge, Node, Problem, bottom_levels, read_problem
from hydra_tune.graph.placement.repair import repair
from hydra_tune.graph.placement.sct import with_favourites
from hydra_tune.graph.placement.simulate import Schedule, simulate
from hydra_tune.graph.placement.topo import fill_in_order


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The device and start of each node."""

    device: Mapping[Node, int]
    start: Mapping[Node, float]
    makespan: float
    memory: tuple[float, ...]
    """Bytes used on each device: its nodes and, with `edge_bytes`, inputs from other devices."""
    algorithm: str
    """Name of the placer that found it; with `best`, the winner."""
    sequence: tuple[Node, ...]
    """All nodes in the order of the schedule; transfers go in the order of their consumers."""


def place(
    times: Mapping[Node, float],
    memory: Mapping[Node, float],
    edges: Mapping[Edge, float],
    *,
    devices: int,
    capacity: float | Sequence[float] | None = None,
    algorithm: str = "best",
    channel: str = "parallel",
    edge_bytes: Mapping[Edge, float] | None = None,
    groups: Iterable[Collection[Node]] = (),
    fused: bool = False,
) -> Placement:
    """Place the nodes of a graph on devices, so that one run of all nodes ends early.

    `times` and `memory` give the seconds and bytes of each node; `edges` gives for each pair of producer and consumer
    the seconds of the transfer if they are on different devices. `capacity` is the memory of each device, one number
    for all, or None. With `edge_bytes`, inputs from other devices use memory too. `groups` are nodes to keep together.
    `channel` is `parallel`, or `sequential` if a device does one transfer at a time. `fused` places nodes together with
    their only consumers if little is lost by that: for large graphs.

    Raises SpecError for invalid input, and PlacementInfeasible if the devices have too little memory.
    """
    if algorithm not in ALGORITHMS:
        raise SpecError(f"there is no placer {quoted(algorithm)}", nearest(str(algorithm), ALGORITHMS))
    problem = read_problem(
        times, memory, edges,
        devices=devices, capacity=capacity, channel=channel, edge_bytes=edge_bytes, groups=groups,
    )  # fmt: skip
    name, schedule = _fused(problem, algorithm) if fused else _run(problem, algorithm)
    return _placement(problem, schedule, name)


def m_topo(problem: Problem) -> Schedule:
    """Fill one device after the other, and run each device's nodes in topological order."""
    where = repair(problem, fill_in_order(problem))
    return simulate(problem, [where[group] for group in problem.group], range(len(problem.nodes)))


def m_etf(problem: Problem) -> Schedule:
    """Launch the node that can start earliest."""
    return _finished(problem, earliest_first(problem))


def m_sct(problem: Problem) -> Schedule:
    """Launch the node that can start earliest, but wait for favourite children."""
    return _finished(problem, with_favourites(problem))


PLACERS: dict[str, Callable[[Problem], Schedule]] = {"m-topo": m_topo, "m-etf": m_etf, "m-sct": m_sct}
ALGORITHMS = (*PLACERS, "best")


def _longest_way_first(problem: Problem) -> Schedule:
    """Run m-ETF with ties broken by the path to the end, not by topological order."""
    return _finished(problem, earliest_first(problem, [-way for way in bottom_levels(problem)]))


def _run(problem: Problem, algorithm: str) -> tuple[str, Schedule]:
    """Return the schedule, and the name of the placer that found it."""
    return _best(problem) if algorithm == "best" else (algorithm, PLACERS[algorithm](problem))


def _fused(problem: Problem, algorithm: str) -> tuple[str, Schedule]:
    """Run on fused nodes, or on single nodes if fused ones do not fit the devices."""
    smaller = fuse(problem)
    try:
        name, schedule = _run(smaller.problem, algorithm)
    except PlacementInfeasible:
        return _run(problem, algorithm)
    return name, smaller.expanded(schedule)


def _best(problem: Problem) -> tuple[str, Schedule]:
    """Return the shortest schedule found, and the name of the placer it came from.

    Beyond the three placers: m-ETF with the longest path to the end first, and one device for all (m-TOPO with all
    memory as the fair share), so that many devices are never slower than one. Each device's nodes are also reordered by
    the path to the end. Then a local search continues from each schedule, the most promising first.
    """
    found = []
    for name, placer in (*PLACERS.items(), ("m-etf", _longest_way_first)):
        try:
            found.append((name, placer(problem)))
        except PlacementInfeasible as error:
            failure = error  # another placer may leave a placement that can be repaired
            if error.proven:
                break
    if not found:
        raise failure
    largest = max(problem.devices, key=lambda device: problem.capacity[device])
    if sum(problem.memory) <= problem.capacity[largest]:
        found.append(("m-topo", simulate(problem, [largest] * len(problem.nodes), range(len(problem.nodes)))))
    found += [(name, in_good_order(problem, _where(problem, schedule))) for name, schedule in found]
    search = Search(problem)
    found.sort(key=lambda each: each[1].makespan)
    return min(((name, search.improve(schedule)) for name, schedule in found), key=lambda each: each[1].makespan)


def _finished(problem: Problem, launcher: Launcher) -> Schedule:
    """Return the launched schedule; after a dead end, the repaired placement in a new order."""
    overfull = problem.limited and min(launcher.room.free) < 0
    if not launcher.stuck and not overfull:
        return launcher.clock.schedule()
    return in_good_order(problem, repair(problem, launcher.room.where))


def _where(problem: Problem, schedule: Schedule) -> list[int]:
    """Return the device of each group."""
    return [schedule.device[members[0]] for members in problem.members]


def _placement(problem: Problem, schedule: Schedule, algorithm: str) -> Placement:
    return Placement(
        device={node: schedule.device[i] for i, node in enumerate(problem.nodes)},
        start={node: schedule.start[i] for i, node in enumerate(problem.nodes)},
        makespan=schedule.makespan,
        memory=Room.of(problem, _where(problem, schedule)).used,
        algorithm=algorithm,
        sequence=tuple(problem.nodes[i] for i in schedule.sequence),
    )
