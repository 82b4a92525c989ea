"""The random streams of a pack's members: each draws the numbers that it would draw when trained alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from hydra_tune.core.random_state import RandomState

Held: TypeAlias = tuple[RandomState, torch.Tensor]
"""A random state whose torch part is the generator state beside it."""


class Streams:
    """One generator for each member, continuing from the trial's own random state."""

    def __init__(self, states: Sequence[RandomState], device: torch.device) -> None:
        self.device = device
        self.states = list(states)
        """Each member's state as of the last `captured`; its torch part is in the generators since."""
        self.generators = [self._generator(state) for state in self.states]

    def _generator(self, state: RandomState) -> torch.Generator:
        generator = torch.Generator(self.device)
        held = state.torch_state if state.device_state is None else state.device_state
        generator.set_state(held.clone())
        return generator

    def captured(self, member: int) -> RandomState:
        """Return a member's random state as it is now."""
        held, state = self.generators[member].get_state(), self.states[member]
        changed: dict[str, Any] = {"torch_state": held} if state.device_state is None else {"device_state": held}
        self.states[member] = replace(state, **changed)
        return self.states[member]

    def copies(self) -> list[Held]:
        """Return each member's random state, to be restored."""
        pairs = zip(self.states, self.generators, strict=True)
        return [(state, generator.get_state()) for state, generator in pairs]

    def restore(self, held: Sequence[Held]) -> None:
        """Continue from these states."""
        self.states = [state for state, _ in held]
        for generator, (_, drawn) in zip(self.generators, held, strict=True):
            generator.set_state(drawn)

    def copy(self) -> Streams:
        """Return streams that continue from here by themselves, as an evaluation does."""
        return Streams([self.captured(member) for member in range(len(self.states))], self.device)

    def run_as(self, member: int, work: Callable[[], Any]) -> Any:
        """Run code of the user that may draw from the process's generators, with those of a member."""
        self.captured(member).restore(self.device)
        try:
            return work()
        finally:
            self.states[member] = RandomState.capture(self.device)
            self.generators[member] = self._generator(self.states[member])

    def drawn(self, rows: torch.Tensor, fill: Callable[..., Any]) -> torch.Tensor:
        """Fill a tensor with a row for each member; `fill(row, member, generator)` draws the values of one."""
        for member, generator in enumerate(self.generators):
            fill(rows[member], member, generator)
        return rows
