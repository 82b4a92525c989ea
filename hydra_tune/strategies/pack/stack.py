"""The parameters, buffers and optimizer state of a pack's members in common memory, a row for each member.

Each member's model keeps its own tensors, but as views of its row: what reads or writes a member's model, such as a
checkpoint, sees the pack's numbers without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hydra_tune.strategies.pack.member import Member
from hydra_tune.strategies.pack.optimizers import Form, Kind


@dataclass
class Column:
    """One parameter of all members, in the columns `start` to `end` of its group's matrix."""

    name: str
    position: int
    """Position among the model's parameters."""
    start: int
    end: int
    leaf: torch.Tensor
    """The parameter of all members, for autograd; it shares the matrix's memory."""


@dataclass
class GroupStack:
    """One parameter group of all members: a matrix each of parameters, gradients and each state tensor."""

    form: Form
    options: dict[str, bool]
    index: int
    columns: list[Column]
    values: torch.Tensor
    state: dict[str, torch.Tensor]
    steps: list[list[int]]
    """Steps made, by parameter and member; they differ where a parameter has had no gradient."""
    gradients: torch.Tensor | None = None
    """Gradients of the batches since the last step."""
    used: tuple[bool, ...] = ()
    """Parameters with a gradient since the last step."""

    def add_gradients(self, found: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of a batch, one for each column."""
        rows = len(self.values)
        parts = [
            torch.zeros_like(self.values[:, column.start : column.end])
            if gradient is None
            else gradient.reshape(rows, -1)
            for column, gradient in zip(self.columns, found, strict=True)
        ]
        new = torch.cat(parts, 1) if len(parts) > 1 else parts[0].clone()
        self.gradients = new if self.gradients is None else self.gradients.add_(new)
        have = tuple(gradient is not None for gradient in found)
        self.used = tuple(map(max, self.used, have)) if self.used else have

    def step(self, members: Sequence[Member]) -> None:
        """Make an optimizer step of every member with its own hyperparameters, and drop the gradients."""
        assert self.gradients is not None
        groups = [member.optimizer.param_groups[self.index] for member in members]
        for first, last in self._ranges():
            for index in range(first, last):
                self.steps[index] = [count + 1 for count in self.steps[index]]
            numbers = [self.form.coefficients(g, s) for g, s in zip(groups, self.steps[first], strict=True)]
            table = torch.tensor(numbers, dtype=torch.float64).to(self.values)
            part = slice(self.columns[first].start, self.columns[last - 1].end)
            gradient = self.gradients[:, part]
            self.form.update(
                self.values[:, part], gradient.neg() if self.options["maximize"] else gradient,
                {name: tensor[:, part] for name, tensor in self.state.items()}, torch.split(table, 1, 1), self.options,
            )  # fmt: skip
        self.gradients, self.used = None, ()

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of neighbouring parameters with gradients and equal numbers of steps."""
        found, at = [], 0
        keys = zip(self.used, self.steps, strict=True)
        for (used, _steps), same in itertools.groupby(keys):
            length = len(list(same))
            if used:
                found.append((at, at + length))
            at += length
        return found

    def row(self, tensor: torch.Tensor, column: Column, member: int) -> torch.Tensor:
        """Return a member's part of a matrix, in the shape of its parameter."""
        return tensor[member, column.start : column.end].view(column.leaf.shape[1:])


@dataclass
class Stack:
    """All tensors of a pack's members."""

    members: list[Member]
    groups: list[GroupStack]
    parameters: dict[str, torch.Tensor]
    """Stacked parameters by name, those without gradients included."""
    buffers: dict[str, torch.Tensor]
    fixed: dict[str, torch.Tensor] = field(default_factory=dict)
    """Stacked parameters without gradients."""

    @classmethod
    @torch.no_grad()
    def of(cls, members: Sequence[Member], kind: Kind) -> Stack:
        """Move the members' tensors into common memory, and let their models view it."""
        owned = [list(member.model.named_parameters()) for member in members]
        parameters: dict[str, torch.Tensor] = {}
        groups = []
        for index, positions in enumerate(kind.groups):
            if positions:
                groups.append(_group(members, owned, kind, index, positions))
                parameters.update((column.name, column.leaf) for column in groups[-1].columns)
        fixed = {}
        for position, (name, _parameter) in enumerate(owned[0]):
            if name not in parameters:
                fixed[name] = parameters[name] = _joined([each[position][1] for each in owned])
        named = [dict(member.model.named_buffers()) for member in members]
        buffers = {name: _joined([each[name] for each in named]) for name in named[0]}
        return cls(list(members), groups, {name: parameters[name] for name, _ in owned[0]}, buffers, fixed)

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor in common memory."""
        own = [tensor for group in self.groups for tensor in (group.values, *group.state.values())]
        return [*own, *self.fixed.values(), *self.buffers.values()]

    @torch.no_grad()
    def release(self, member: Member) -> None:
        """Give a member memory of its own again, as if it had been trained alone."""
        self.settle(member)
        for tensor in [*member.model.parameters(), *member.model.buffers()]:
            tensor.data = tensor.data.clone()
        for parameter in member.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        for state in member.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.clone()

    def settle(self, member: Member) -> None:
        """Bring a member's optimizer state and gradients up to date, as views of its row."""
        row = self.members.index(member)
        parameters = list(member.model.parameters())
        for group in self.groups:
            for index, column in enumerate(group.columns):
                parameter, steps = parameters[column.position], group.steps[index][row]
                pending = group.gradients is not None and group.used[index]
                parameter.grad = (
                    group.row(group.gradients, column, row) if pending and group.gradients is not None else None
                )
                if steps and (group.state or group.form.counts_steps):
                    counted = {"step": torch.tensor(float(steps))} if group.form.counts_steps else {}
                    views = {name: group.row(tensor, column, row) for name, tensor in group.state.items()}
                    member.optimizer.state[parameter] = {**counted, **views}


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors, each of which becomes a view of its row."""
    stacked = torch.stack([tensor.detach() for tensor in tensors])
    for row, tensor in enumerate(tensors):
        tensor.data = stacked[row]
    return stacked


def _group(
    members: Sequence[Member],
    owned: Sequence[Sequence[tuple[str, torch.nn.Parameter]]],
    kind: Kind,
    index: int,
    positions: Sequence[int],
) -> GroupStack:
    first = [owned[0][position][1] for position in positions]
    ends = list(itertools.accumulate(parameter.numel() for parameter in first))
    rows, width = len(members), ends[-1]
    values = torch.empty(rows, width, dtype=first[0].dtype, device=first[0].device)
    options = dict(kind.options[index])
    state = {name: torch.zeros_like(values) for name in kind.form.state(options)}
    columns, steps, pending = [], [], []
    for position, end, like in zip(positions, ends, first, strict=True):
        part = slice(end - like.numel(), end)
        mine = [each[position][1] for each in owned]
        pending.append([parameter.grad for parameter in mine])
        for row, (member, parameter) in enumerate(zip(members, mine, strict=True)):
            values[row, part] = parameter.detach().reshape(-1)
            parameter.data = values[row, part].view(parameter.shape)
            for name, matrix in state.items():
                held = member.optimizer.state.get(parameter, {}).get(name)
                if held is not None:
                    matrix[row, part] = held.reshape(-1)
        leaf = values[:, part].view(rows, *like.shape).detach().requires_grad_()
        columns.append(Column(owned[0][position][0], position, part.start, end, leaf))
        steps.append([_steps(member, parameter) for member, parameter in zip(members, mine, strict=True)])
    made = GroupStack(kind.form, options, index, columns, values, state, steps)
    if any(gradient is not None for gradients in pending for gradient in gradients):
        made.add_gradients([_stacked(gradients) for gradients in pending])
    return made


def _steps(member: Member, parameter: torch.nn.Parameter) -> int:
    """Return the number of steps of a parameter's optimizer state; 1 stands for any where they are not counted."""
    state = member.optimizer.state.get(parameter, {})
    if "step" in state:
        return int(state["step"])
    return int(any(isinstance(value, torch.Tensor) for value in state.values()))


def _stacked(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    like = next((gradient for gradient in gradients if gradient is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if gradient is None else gradient for gradient in gradients])
