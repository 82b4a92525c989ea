"""Checks of strategies' options; each raises a SpecError that names the option, its value and the fix."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_tune.core.errors import SpecError, nearest, quoted


def check_count(name: str, value: object, least: int = 1, *, optional: bool = False) -> None:
    """Check for a whole number of at least `least`; also accept None if `optional`."""
    if value is None and optional:
        return
    if not is_count(value, least):
        raise SpecError(f"{name} cannot be {quoted(value)}", f"give a whole number from {least} on")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Check for one of the known names."""
    if value not in known:
        raise SpecError(f"{name} cannot be {quoted(value)}", nearest(str(value), known))


def is_count(value: object, least: int) -> bool:
    """True for a whole number of at least `least`; False for a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
