"""References to functions of workers: they pickle as the function, and every one in the package has a function."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hydra_tune
from hydra_tune.engine.remote import RemoteFunction, find_function, remote

PACKAGE = Path(hydra_tune.__file__).parent


def references() -> Iterator[tuple[str, str, str]]:
    """Each use of a remote module: the file, the module and the name."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        modules: dict[str, str] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Call(func=ast.Name(id="remote"), args=[ast.Constant(value=str(module))]),
                ):
                    modules[name] = module
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                    yield str(file.relative_to(PACKAGE)), modules[name], attribute


def test_every_reference_of_the_package_has_a_function() -> None:
    found = list(references())
    assert len(found) > 5
    for file, module, name in found:
        function = getattr(importlib.import_module(module), name, None)
        assert inspect.isfunction(function), f"{file} refers to {module}.{name}, which is no function"
        assert function.__module__ == module, f"{file} refers to {module}.{name}, which is defined elsewhere"


def test_a_reference_unpickles_as_the_function() -> None:
    reference = remote("json").dumps
    assert isinstance(reference, RemoteFunction)
    assert pickle.loads(pickle.dumps(reference)) is find_function("json", "dumps")
    assert reference([1]) == "[1]"


def test_a_reference_does_not_import_its_module() -> None:
    code = (
        "import pickle, sys\n"
        "from hydra_tune.engine.remote import remote\n"
        "pickle.dumps(remote('wave').open)\n"
        "assert 'wave' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wrong_name_is_told_when_it_is_used() -> None:
    with pytest.raises(AttributeError, match="dumpz"):
        remote("json").dumpz([1])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        remote("no_such_module").work()
    with pytest.raises(AttributeError, match="dumpz"):
        pickle.loads(pickle.dumps(remote("json").dumpz))
    with pytest.raises(TypeError, match=r"json\.__name__ is no function"):
        find_function("json", "__name__")
    with pytest.raises(AttributeError, match="private"):
        remote("json")._default_encoder  # noqa: B018
