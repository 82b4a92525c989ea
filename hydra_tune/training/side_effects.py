"""Finds lists and dicts outside of a build function that a trial has changed: the change stays in its worker.

Under plain Optuna, an objective may append to a list of the script. In a search each worker has a copy of its own,
which the script never sees. This module detects the change; the coordinator prints one note for a search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LOST_CHANGE = "lost change"
"""Kind of the event."""
LONGEST = 1000
"""A longer list or dict is only compared by its length."""


class MutableState:
    """The lists and dicts that a function refers to, as they were."""

    def __init__(self, found: dict[str, list[Any] | dict[Any, Any]]) -> None:
        self._found = found
        self._before = {name: _content(value) for name, value in found.items()}

    def changed(self) -> str:
        """Return a sentence about the first that has changed; empty if none has."""
        for name, value in self._found.items():
            if not _same(_content(value), self._before[name]):
                kind = type(value).__name__
                return (
                    f"the objective changed {name!r}, a {kind} outside of it: trials run in other processes, so the "
                    "script will not see that (return it, or keep it with trial.set_user_attr)"
                )
        return ""


def mutable_state(build: Callable[..., Any]) -> MutableState | None:
    """Return the lists and dicts in a function's closure and among the globals that it names; None if it has none."""
    code = getattr(build, "__code__", None)
    if code is None:
        return None
    found = {}
    for name, cell in zip(code.co_freevars, build.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable without a value yet
            continue
    known = build.__globals__
    found |= {name: known[name] for name in code.co_names if name in known}
    kept = {name: value for name, value in found.items() if type(value) in (list, dict)}
    return MutableState(kept) if kept else None


def _content(value: list[Any] | dict[Any, Any]) -> list[Any]:
    if len(value) > LONGEST:
        return [len(value)]
    return [*value] if isinstance(value, list) else [*value.keys(), *value.values()]


def _same(now: list[Any], before: list[Any]) -> bool:
    """True for the same objects: comparing values might run user code, or compare arrays."""
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
