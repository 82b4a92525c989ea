"""Finds the modules that a user's file imports from its own folder, by reading it without importing.

Files are followed from import to import, also inside functions. Imports by a computed name are not seen, and modules
elsewhere, such as installed packages, are assumed not to change between two runs of a study.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def text_with_imports(file: Path, folder: Path) -> str | None:
    """Return the text of `file` and its imports from `folder`, each under its name; None if unreadable."""
    found = files_with_imports([file], folder)
    if not found:
        return None
    others = sorted(found.keys() - {file})
    return "\n".join([found[file], *(f"# {other.relative_to(folder)}\n{found[other]}" for other in others)])


def files_with_imports(files: Iterable[Path], folder: Path) -> dict[Path, str]:
    """Return the texts of the readable ones among `files`, and of each file in `folder` that they import."""
    found = {file: text for file in files if (text := _read(file)) is not None}
    waiting = list(found)
    while waiting:
        importing = waiting.pop()
        for imported in _imported_files(importing, found[importing], folder):
            if imported not in found and (beside := _read(imported)) is not None:
                found[imported] = beside
                waiting.append(imported)
    return found


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _imported_files(file: Path, text: str, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # the import reports it when the candidate is built
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield from _files_of(folder, name.name.split("."), folder)
        elif isinstance(node, ast.ImportFrom):
            # Dots as in Python: one is the file's own package.
            start = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else folder
            package = node.module.split(".") if node.module else []
            for name in node.names:
                yield from _files_of(start, [*package, name.name], folder)


def _files_of(start: Path, parts: list[str], folder: Path) -> Iterator[Path]:
    """Yield the files that run when `parts` is imported from `start`: the packages, then the module itself."""
    place = start
    for part in parts:
        place = place / part
        for file in (place / "__init__.py", place.with_name(f"{part}.py")):
            if file.is_relative_to(folder) and file.is_file():
                yield file
