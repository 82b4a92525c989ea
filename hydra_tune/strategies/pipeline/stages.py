"""Stages of a placement: runs of operations on one device that never wait in between.

A stage waits for values of other devices only at its start and sends values only at its end, so stages cannot deadlock.
Cutting by device alone could: an operation before a branch and one after it would be in one piece. Pure: no tensors, no
clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydra_tune.graph.costs import NodeCost

if TYPE_CHECKING:
    from hydra_tune.graph.capture import Captured, Node
    from hydra_tune.graph.profile import Profile
    from hydra_tune.graph.program import Program

TARGETS = -1
"""Number of the batch's targets among the values."""


@dataclass(frozen=True)
class Stage:
    """Operations that run on one device, one after another, for one micro-batch at a time."""

    index: int
    device: int
    ops: tuple[int, ...]
    takes: tuple[int, ...]
    """Values from the batch or from other stages."""
    gives: tuple[int, ...]
    """Values that other stages use."""
    before: tuple[int, ...]
    """Stages that this one waits for."""
    loss: bool
    """True if the stage ends with the loss."""
    forward_seconds: float
    """Seconds per micro-batch, as profiled; in a layout, including copies between devices."""
    backward_seconds: float
    step_seconds: float
    state_bytes: int
    """Bytes of parameters, gradients and optimizer state."""
    activation_bytes: int
    """Bytes per micro-batch in flight."""
    peak_bytes: int
    """Temporary bytes on top of state and activations."""
    nodes: tuple[str, ...]
    later: tuple[int, ...] = ()
    """Operations whose weight gradients can be computed after the gradients that another device waits for. Empty if the
    device has other stages, which would have to wait in turn."""
    later_seconds: float = 0.0
    """Seconds of the backward spent on these weight gradients."""
    judged_bytes: int = 0
    """Temporary bytes of the forward of a whole batch in evaluation, where no activations are kept."""


@dataclass(frozen=True)
class Atom:
    """Nodes placed together, because no cut between them is possible."""

    nodes: tuple[int, ...]
    costs: tuple[NodeCost, ...]

    @property
    def seconds(self) -> float:
        return sum(cost.forward_seconds + cost.backward_seconds for cost in self.costs)

    @property
    def state_bytes(self) -> int:
        return sum(cost.state_bytes for cost in self.costs)

    @property
    def activation_bytes(self) -> int:
        return sum(cost.activation_bytes + cost.boundary_bytes for cost in self.costs)

    @property
    def peak_bytes(self) -> int:
        return max(cost.peak_bytes for cost in self.costs)


def atoms_of(profile: Profile) -> tuple[Atom, ...]:
    """Group the nodes into atoms, between which a cut is possible."""
    atoms: list[Atom] = []
    start = 0
    for index, cost in enumerate(profile.nodes):
        if cost.cut_allowed or index == len(profile.nodes) - 1:
            atoms.append(Atom(tuple(range(start, index + 1)), profile.nodes[start : index + 1]))
            start = index + 1
    return tuple(atoms)


def keeps_order(profile: Profile) -> bool:
    """True if stages must run in the order of the model's operations.

    This holds if the model draws random numbers from one stream, changes a value in place, or has a place where it
    cannot be cut.
    """
    return profile.draws or bool(profile.mutated) or not all(cost.cut_allowed for cost in profile.nodes[:-1])


def edges_of(captured: Captured, atoms: Sequence[Atom], value_bytes: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """Return the bytes passed between each pair of atoms."""
    program = captured.program
    maker = {program.value_of(op): number for number, atom in enumerate(atoms) for op in _ops(captured.nodes, atom)}
    edges: dict[tuple[int, int], int] = {}
    for number, atom in enumerate(atoms):
        for value in _used(program, _ops(captured.nodes, atom)):
            made = maker.get(value)
            if made is not None and made != number:
                edges[made, number] = edges.get((made, number), 0) + value_bytes.get(value, 0)
    return edges


def groups_of(captured: Captured, atoms: Sequence[Atom], *, buffers: bool) -> list[set[int]]:
    """Group atoms that share a parameter, which can be on one device only. Buffers count if the forward changes them.

    Sharing is transitive: if atom 1 shares a parameter with 2, and 2 another with 3, all three are one group.
    """
    users: dict[str, set[int]] = {}
    for number, atom in enumerate(atoms):
        for node in (captured.nodes[index] for index in atom.nodes):
            for name in (*node.parameters, *(node.buffers if buffers else ())):
                users.setdefault(name, set()).add(number)
    groups: list[set[int]] = []
    for together in users.values():
        touching = [group for group in groups if group & together]
        groups = [group for group in groups if not group & together]
        groups.append(together.union(*touching))
    return [group for group in groups if len(group) > 1]


def stages_of(
    captured: Captured, profile: Profile, atoms: Sequence[Atom], device: Sequence[int], *, judged_batches: float = 0.0,
    metric_bytes: int = 0,
) -> tuple[Stage, ...]:  # fmt: skip
    """Return the stages of a placement, in a valid order of execution; `device` has one entry per atom.

    Evaluation uses batches of `judged_batches` times the profile's rows, and `metric_bytes` for loss and metrics.
    """
    program = captured.program
    in_order = keeps_order(profile)
    where = {op: device[number] for number, atom in enumerate(atoms) for op in _ops(captured.nodes, atom)}
    runs = _in_order(program, where) if in_order else _by_device(program, where, _pieces(captured, profile))
    stage_of = {op: index for index, run in enumerate(runs) for op in run}
    first = program.value_of(0)
    takes = [_used(program, run) - {program.value_of(op) for op in run} for run in runs]
    stages = []
    for index, run in enumerate(runs):
        made = {program.value_of(op) for op in run}
        wanted = set().union(*(taken for other, taken in enumerate(takes) if other != index))
        before = {stage_of[value - first] for value in takes[index] if value >= first}
        if in_order and index:
            before.add(index - 1)
        own = [(node, cost) for node, cost in zip(captured.nodes, profile.nodes, strict=True) if node.start in run]
        waited_for = any(where[value - first] != where[run[0]] for value in takes[index] if value >= first)
        by_itself = sum(where[other[0]] == where[run[0]] for other in runs) == 1
        later = [(node, cost) for node, cost in own if waited_for and by_itself and node.layer in run]
        stages.append(
            Stage(
                index, where[run[0]], tuple(run), tuple(sorted(takes[index])), tuple(sorted(made & wanted)),
                tuple(sorted(before)), loss=len(program) - 1 in run,
                forward_seconds=sum(cost.forward_seconds for _, cost in own),
                backward_seconds=sum(cost.backward_seconds for _, cost in own),
                step_seconds=sum(cost.step_seconds for _, cost in own),
                state_bytes=sum(cost.state_bytes for _, cost in own),
                activation_bytes=sum(cost.activation_bytes + cost.boundary_bytes for _, cost in own),
                peak_bytes=max((cost.peak_bytes for _, cost in own), default=0),
                nodes=tuple(node.name for node, _ in own),
                later=tuple(node.layer for node, _ in later if node.layer is not None),
                # In a layer's backward, one matrix product is for its input and one, as large, for its weights.
                later_seconds=sum(cost.backward_seconds for _, cost in later) / 2,
                judged_bytes=int(judged_batches * (_judged([cost for _, cost in own])
                + sum(profile.value_bytes.get(value, 0) for value in takes[index])))
                + (metric_bytes if len(program) - 1 in run else 0),
            )
        )  # fmt: skip
    return tuple(stages)


def _judged(costs: Sequence[NodeCost]) -> int:
    """Return the largest sum of input, output and temporary bytes over these nodes."""
    into = [0, *(cost.boundary_bytes for cost in costs)]
    return max(
        (a + cost.boundary_bytes + cost.forward_peak_bytes for a, cost in zip(into, costs, strict=False)), default=0
    )


def _pieces(captured: Captured, profile: Profile) -> list[list[int]]:
    """Group operations that must stay together: all of a node with in-place changes, otherwise each alone."""
    pieces: list[list[int]] = []
    for index, node in enumerate(captured.nodes):
        ops = list(range(node.start, node.stop))
        pieces += [ops] if index in profile.in_place else [[op] for op in ops]
    return pieces


def _in_order(program: Program, where: Mapping[int, int]) -> list[list[int]]:
    """Return runs of consecutive operations on one device, in the model's order."""
    runs: list[list[int]] = []
    for op in range(len(program)):
        if runs and where[runs[-1][-1]] == where[op]:
            runs[-1].append(op)
        else:
            runs.append([op])
    return runs


def _by_device(program: Program, where: Mapping[int, int], pieces: Sequence[list[int]]) -> list[list[int]]:
    """Return runs per device that wait for others only at their start and are waited for only at their end."""
    first = program.value_of(0)
    passed = [
        (value - first, op)
        for op in range(len(program))
        for value in _used(program, [op])
        if value >= first and where[value - first] != where[op]
    ]
    arrives = {op for _, op in passed}
    leaves = {op for op, _ in passed}
    runs: list[list[int]] = []
    open_run: dict[int, list[int]] = {}
    for piece in pieces:
        device = where[piece[0]]
        run = open_run.get(device)
        if run is None or arrives.intersection(piece):
            run = open_run[device] = []
            runs.append(run)
        run += piece
        if leaves.intersection(piece):
            open_run.pop(device)
    return _joined(program, _sorted(program, runs), where)


def _joined(program: Program, runs: list[list[int]], where: Mapping[int, int]) -> list[list[int]]:
    """Join consecutive runs of one device if that delays no other device.

    A run ends where a value goes to another device. If the run that takes the value must wait for this device's next
    run too (as for the caches of all layers that a language model returns), and that next run waits for no other value,
    both become one.
    """
    found = next(_joinable(program, runs, where), None)
    while found is not None:
        first, second = found
        others = [run for index, run in enumerate(runs) if index not in found]
        runs = _sorted(program, [*others, sorted(runs[first] + runs[second])])
        found = next(_joinable(program, runs, where), None)
    return runs


def _joinable(
    program: Program, runs: Sequence[list[int]], where: Mapping[int, int]
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Yield pairs of runs that follow each other on one device and can be one."""
    device = [where[run[0]] for run in runs]
    direct = _waits(program, runs)
    needs: list[set[int]] = []
    for own in direct:  # in topological order
        needs.append(own.union(*(needs[other] for other in own)))
    for first, second in _neighbours(device):
        takers = [run for run, own in enumerate(direct) if first in own and device[run] != device[first]]
        if needs[second] <= needs[first] | {first} and all(second in needs[run] for run in takers):
            yield first, second


def _neighbours(device: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of runs that follow each other on one device."""
    latest: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for index, own in enumerate(device):
        if own in latest:
            pairs.append((latest[own], index))
        latest[own] = index
    return pairs


def _sorted(program: Program, runs: list[list[int]]) -> list[list[int]]:
    """Sort the runs so that each comes after those it takes values from."""
    waits = _waits(program, runs)
    done: list[int] = []
    left = list(range(len(runs)))
    while left:
        ready = next(index for index in left if waits[index] <= set(done))
        done.append(ready)
        left.remove(ready)
    return [runs[index] for index in done]


def _waits(program: Program, runs: Sequence[Sequence[int]]) -> list[set[int]]:
    """Return for each run those that it takes values from."""
    first = program.value_of(0)
    run_of = {op: index for index, run in enumerate(runs) for op in run}
    return [
        {run_of[value - first] for value in _used(program, run) if value >= first} - {index}
        for index, run in enumerate(runs)
    ]


def _ops(nodes: Sequence[Node], atom: Atom) -> range:
    return range(nodes[atom.nodes[0]].start, nodes[atom.nodes[-1]].stop)


def _used(program: Program, ops: Iterable[int]) -> set[int]:
    """Return the values these operations use; the last operation includes the loss, which uses the model's output."""
    ops = list(ops)
    used = {value for op in ops for value in program.training[op].refs()}
    return used | program.results if len(program) - 1 in ops else used
