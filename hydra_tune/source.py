"""Where a build function comes from, in a form that can travel to the process that calls it.

The coordinator never imports a user's file: it sends its name, and builder and workers import it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from hydra_tune.errors import SpecError, nearest, quoted
from hydra_tune.imports import text_with_imports

Build = Callable[[Any], Any]


class Source(Protocol):
    """A build function at a distance."""

    def load(self) -> Build:
        """The function, in this process."""
        ...

    def describe(self) -> dict[str, Any] | None:
        """What finds the function again from the command line, as plain data; None where nothing can."""
        ...

    def folder(self) -> str | None:
        """Where modules beside it are found; None where it brings its own."""
        ...

    def text(self) -> str | None:
        """What is written there, to tell whether it has changed; None where that cannot be read."""
        ...


@dataclass(frozen=True)
class PickledSource:
    """A function given in Python; one from `__main__` or a notebook travels by value."""

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
        return pickle.loads(self.data)  # type: ignore[no-any-return]

    def describe(self) -> dict[str, Any] | None:
        return None

    def folder(self) -> str | None:
        return None

    def text(self) -> str | None:
        return self.written


@dataclass(frozen=True)
class FileSource:
    """`file.py:function`."""

    path: str
    function: str

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
            # By value: the name under which it was imported here means nothing in another process.
            cloudpickle.register_pickle_by_value(module)
        return _function(sys.modules[name], self.function, self.path)

    def describe(self) -> dict[str, Any]:
        return {"kind": "file", "path": self.path, "function": self.function}

    def folder(self) -> str | None:
        return str(Path(self.path).parent)  # as when Python runs a script: its folder comes first

    def text(self) -> str | None:
        path = Path(self.path)
        return text_with_imports(path, path.parent)


@dataclass(frozen=True)
class ModuleSource:
    """`package.module:function`."""

    module: str
    function: str

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
        # Only where it is found without running the code of its package, which the coordinator must not.
        folder = Path.cwd()
        return text_with_imports(folder.joinpath(*self.module.split(".")).with_suffix(".py"), folder)


@dataclass(frozen=True)
class FamilySource:
    """Built-in model families on a data set, with narrowed ranges."""

    families: tuple[str, ...]
    data: Any
    overrides: dict[str, Any]
    epochs: int

    def load(self) -> Build:
        from hydra_tune.search_spaces.families import FamilyBuild

        return FamilyBuild(families=self.families, data=self.data, overrides=self.overrides, epochs=self.epochs)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "family", "families": list(self.families), "data": self.data,
            "overrides": self.overrides, "epochs": self.epochs,
        }  # fmt: skip

    def folder(self) -> str | None:
        return None

    def text(self) -> str | None:
        return json.dumps(self.describe(), indent=1, sort_keys=True)


def parse_source(text: str) -> Source:
    """`file.py:function` or `package.module:function`."""
    place, colon, function = text.rpartition(":")
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


def source_from(description: dict[str, Any]) -> Source:
    """The source that `describe` described."""
    match description:
        case {"kind": "file", "path": str(path), "function": str(function)}:
            return FileSource(path, function)
        case {"kind": "module", "module": str(module), "function": str(function)}:
            return ModuleSource(module, function)
        case {
            "kind": "family",
            "families": list(families),
            "data": data,
            "overrides": dict(overrides),
            "epochs": int(epochs),
        }:
            return FamilySource(tuple(families), data, overrides, epochs)
        case {"kind": "fit", "directory": str(directory), "plan": dict(plan)}:
            from hydra_tune.automl.build import FitPlan, FitSource

            return FitSource(directory, FitPlan.from_json(plan))
    raise SpecError(f"a study's source is {quoted(description)}", "start a new study from its file")


def difference(before: str | None, after: str | None) -> str:
    """What changed between two texts of a source, on one line; empty where nothing did or nobody can tell."""
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
