"""Sources of build functions, in a form that can be sent to the process that calls them.

The coordinator never imports a user's file: it sends its name, and builder and workers import it.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.training.imports import text_with_imports

Build = Callable[[Any], Any]
_TORCH = re.compile(
    r"^\s*(?:import|from)\s+(?:torch|lightning|pytorch_lightning|transformers|timm)\b|\bCandidate\b", re.MULTILINE
)
"""Imports of torch, and the class whose users import it."""


class Source(Protocol):
    """A build function that can be sent to another process."""

    def load(self) -> Build:
        """Load the function in this process."""
        ...

    def describe(self) -> dict[str, Any] | None:
        """Return plain data to find the function again from the command line; None if that is impossible."""
        ...

    def folder(self) -> str | None:
        """Return the folder of the function's neighbouring modules; None if the source brings its own."""
        ...

    def text(self) -> str | None:
        """Return the source text, to detect changes; None if it cannot be read."""
        ...

    def uses_torch(self) -> bool:
        """True if the function will probably import torch, guessed without importing; workers then preload it."""
        ...


@dataclass(frozen=True)
class PickledSource:
    """A function given in Python; one from `__main__` or a notebook is pickled by value."""

    data: bytes
    written: str | None = None

    @classmethod
    def of(cls, build: Build) -> PickledSource:
        try:
            return cls(cloudpickle.dumps(build), _written(build))
        except Exception as error:
            raise SpecError(
                f"the build function cannot be sent to the workers ({error})",
                "make what it refers to inside the function, not outside",
            ) from error

    def load(self) -> Build:
        build: Build = pickle.loads(self.data)
        return build

    def describe(self) -> dict[str, Any] | None:
        return None

    def folder(self) -> str | None:
        return None

    def text(self) -> str | None:
        return self.written

    def uses_torch(self) -> bool:
        return "torch" in sys.modules


@dataclass(frozen=True)
class FileSource:
    """A build function named `file.py:function`."""

    path: str
    function: str

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> FileSource | None:
        match record:
            case {"path": str(path), "function": str(function)}:
                return cls(path, function)
        return None

    def load(self) -> Build:
        path = Path(self.path)
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        name = f"hydra_tune_spec_{hashlib.sha256(self.path.encode()).hexdigest()[:12]}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise SpecError(f"{quoted(self.path)} is not a Python file", "give file.py:function")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
            # By value: the module name used here means nothing in another process.
            cloudpickle.register_pickle_by_value(module)
        return _function(sys.modules[name], self.function, self.path)

    def describe(self) -> dict[str, Any]:
        return {"kind": "file", "path": self.path, "function": self.function}

    def folder(self) -> str | None:
        return str(Path(self.path).parent)  # like a Python script: its folder comes first

    def text(self) -> str | None:
        path = Path(self.path)
        return text_with_imports(path, path.parent)

    def uses_torch(self) -> bool:
        return speaks_of_torch(self.text())


@dataclass(frozen=True)
class ModuleSource:
    """A build function named `package.module:function`."""

    module: str
    function: str

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ModuleSource | None:
        match record:
            case {"module": str(module), "function": str(function)}:
                return cls(module, function)
        return None

    def load(self) -> Build:
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not self.module.startswith(error.name):
                raise
            raise SpecError(
                f"there is no module {self.module!r}", "start where Python finds it, or give a file"
            ) from error
        return _function(module, self.function, self.module)

    def describe(self) -> dict[str, Any]:
        return {"kind": "module", "module": self.module, "function": self.function}

    def folder(self) -> str | None:
        return os.getcwd()  # as with python -m

    def text(self) -> str | None:
        # Only if it is found without running its package's code, which the coordinator must not do.
        folder = Path.cwd()
        return text_with_imports(folder.joinpath(*self.module.split(".")).with_suffix(".py"), folder)

    def uses_torch(self) -> bool:
        return speaks_of_torch(self.text())


def speaks_of_torch(text: str | None) -> bool:
    """True if a source's text suggests that it imports torch; a wrong guess only costs time."""
    return text is not None and _TORCH.search(text) is not None


def parse_source(text: str) -> Source:
    """Return the source for `file.py:function` or `package.module:function`."""
    place, colon, function = text.rpartition(":")
    if not colon and text.endswith(".py") and Path(text).is_file():
        raise SpecError(f"{quoted(text)} names no build function", _suggested(Path(text)))
    if not colon or not function.isidentifier():
        raise SpecError(f"{quoted(text)} names no build function", "give file.py:function or package.module:function")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise SpecError(f"there is no file {quoted(place)}", "give the path of a Python file, then :function")
        return FileSource(str(path.resolve()), function)
    if not all(part.isidentifier() for part in place.split(".")):
        raise SpecError(f"{quoted(place)} is no module name", "give file.py:function or package.module:function")
    return ModuleSource(place, function)


def _suggested(path: Path) -> str:
    """Return a hint with the function of a file that is most likely meant, found without running the file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        return f"give {path}:function; the file cannot be read ({error})"
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.args.args]
    usual = [node.name for node in functions if node.name in ("objective", "build")]
    likely = [node.name for node in functions if node.args.args[0].arg == "trial"]
    name = next(iter([*usual, *likely, *(node.name for node in functions)]), "function")
    return f"give {path}:{name}"


KINDS = {
    "file": "hydra_tune.training.source:FileSource",
    "module": "hydra_tune.training.source:ModuleSource",
    "family": "hydra_tune.search_spaces.source:FamilySource",
    "fit": "hydra_tune.automl.build:FitSource",
}
"""Class of each kind of source that a study can record; those of other packages by name only."""


def source_from(record: dict[str, Any]) -> Source:
    """Return the source for a record made by `describe`."""
    module, _, name = KINDS.get(record.get("kind", ""), "").partition(":")
    source: Source | None = getattr(importlib.import_module(module), name).from_record(record) if module else None
    if source is None:
        raise SpecError(f"a study's source is {quoted(record)}", "start a new study from its file")
    return source


def difference(before: str | None, after: str | None) -> str:
    """Return the changes between two texts of a source, on one line; empty if there are none or if unknown."""
    if before is None or after is None or before == after:
        return ""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    changed = [f"{line[0]} {line[1:].strip()}" for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    more = f" | and {len(changed) - 6} more lines" if len(changed) > 6 else ""
    return " | ".join(changed[:6]) + more


def _written(build: Build) -> str | None:
    try:
        return inspect.getsource(build)
    except (OSError, TypeError):
        return None


def _function(module: Any, name: str, where: str) -> Build:
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise SpecError(f"{where} has no function {name!r}", nearest(name, known))
    return function  # type: ignore[no-any-return]
