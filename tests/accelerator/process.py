"""Runs test bodies in a process that has the test accelerator: torch cannot forget a device once it knows one.

    @on_device
    def test_something() -> None: ...

The first such test of a pytest process starts that process; all of them share it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.build import compiler

_CHILD = "TESTDEV_CHILD"
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the test accelerator cannot be built")


class DeviceProcess:
    """A Python process with the test accelerator."""

    def __init__(self) -> None:
        ours, self._line = os.pipe(), os.pipe()
        self._read, self._write = os.fdopen(self._line[0], "rb"), os.fdopen(ours[1], "wb")
        command = [sys.executable, "-m", "tests.accelerator.process", str(ours[0]), str(self._line[1])]
        root = Path(__file__).parents[2]
        environment = {**os.environ, _CHILD: "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        descriptors = (ours[0], self._line[1])
        self._process = subprocess.Popen(command, pass_fds=descriptors, env=environment, cwd=root)
        for descriptor in descriptors:
            os.close(descriptor)

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> Any:
        """Call a function of a module there; what it raises is raised here."""
        pickle.dump((module, name, arguments), self._write)
        self._write.flush()
        try:
            value, failure = pickle.load(self._read)
        except EOFError:
            raise AssertionError(f"the device's process ended with {self._process.wait()} in {name}") from None
        if failure:
            raise AssertionError(f"in the device's process: {failure}")
        return value

    def close(self) -> None:
        self._write.close()
        self._process.wait()
        self._read.close()


def on_device(body: Callable[..., None]) -> Callable[..., None]:
    """Let a test's body run in the process that has the test accelerator; its arguments must be picklable."""
    if _CHILD in os.environ:
        return body

    def test(device_process: DeviceProcess, **arguments: Any) -> None:
        device_process.run(body.__module__, body.__name__, arguments)

    own = list(inspect.signature(body).parameters.values())
    added = inspect.Parameter("device_process", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([added, *own])  # type: ignore[attr-defined]
    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    if hasattr(body, "pytestmark"):
        test.pytestmark = body.pytestmark  # type: ignore[attr-defined]
    return needs_compiler(test)


def _serve(commands: Any, replies: Any) -> None:
    import torch

    torch.set_num_threads(1)
    importlib.import_module("tests.accelerator.backend")
    while True:
        try:
            module, name, arguments = pickle.load(commands)
        except EOFError:
            return
        value, failure = None, ""
        try:
            value = getattr(importlib.import_module(module), name)(**arguments)
        except BaseException:  # noqa: BLE001 - whatever a test raises is its result
            failure = traceback.format_exc()
        pickle.dump((value, failure), replies)
        replies.flush()


if __name__ == "__main__":
    _serve(os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb"))
