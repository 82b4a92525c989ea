"""A room imports only from rooms earlier in the list, which is written here and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (
    "core", "storage", "engine", "spill", "graph", "training", "strategies", "planner", "search_spaces", "coordinator",
    "cluster", "lightning", "automl", "dashboard", "cli",
)  # fmt: skip
"""Each room may import from those before it."""
PLACES = {"search_spaces": ROOT / "search_spaces", "storage": ROOT / "storage", "cli": ROOT / "cli"}
"""Rooms at the repository's root; the others are folders of the package."""
ENTRANCES = {"__init__.py", "__main__.py", "py.typed"}
"""Files of the package outside of all rooms: they name what users import."""


def place(room: str) -> Path:
    return PLACES.get(room, ROOT / "hydra_tune" / room)


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """The line and the room of each import of ours, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "hydra_tune" else [module]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "hydra_tune":
                yield node.lineno, rest.partition(".")[0]


def test_every_module_is_in_a_room() -> None:
    folders = {entry.name for entry in (ROOT / "hydra_tune").iterdir() if entry.name != "__pycache__"}
    assert folders == (set(ROOMS) - set(PLACES)) | ENTRANCES


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_those_before_it(room: str) -> None:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    upward = [
        f"{file.relative_to(ROOT)}:{line} imports {target or 'hydra_tune'}"
        for file in sorted(place(room).rglob("*.py"))
        for line, target in imported(file)
        if target not in allowed
    ]
    assert upward == []


def test_tests_mirror_the_rooms() -> None:
    folders = {entry.name for entry in (ROOT / "tests").iterdir() if entry.is_dir() and entry.name != "__pycache__"}
    assert set(ROOMS) - folders == set()
    assert folders - set(ROOMS) == {"accelerator", "e2e", "fault", "optuna", "zoo"}, "those that use all rooms"
