"""References to functions that run in workers, for a coordinator that must not import their modules.

The coordinator names the work of a unit, and a worker runs it. Modules with such work import torch, which would triple
the start-up time and the memory of the coordinator. `remote("package.module")` represents such a module:

    if TYPE_CHECKING:
        from hydra_tune.strategies.shard import units as units
    else:
        units = remote("hydra_tune.strategies.shard.units")

`units.cut` is then a `RemoteFunction` that pickles as the function itself, while a type checker sees the real one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RemoteFunction:
    """A function referenced by module and name; unpickling the reference returns the function itself."""

    module: str
    name: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Import the function and call it in this process."""
        return find_function(self.module, self.name)(*args, **options)

    def __reduce__(self) -> tuple[Callable[[str, str], Callable[..., Any]], tuple[str, str]]:
        return find_function, (self.module, self.name)


class RemoteModule:
    """A module that is not imported here; each attribute is a reference to its function of that name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<remote module {self._name}>"

    def __getattr__(self, name: str) -> RemoteFunction:
        if name.startswith("_"):
            raise AttributeError(f"remote module {self._name} gives no reference to {name!r}: it is private")
        return RemoteFunction(self._name, name)


def remote(module: str) -> RemoteModule:
    """Return references to the functions of a module, without importing it."""
    return RemoteModule(module)


def find_function(module: str, name: str) -> Callable[..., Any]:
    """Import the module and return its function; raise an ImportError or AttributeError if it is missing."""
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{module}.{name} is no function: it cannot be the work of a unit")
    return function  # type: ignore[no-any-return]
