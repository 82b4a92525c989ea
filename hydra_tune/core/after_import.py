"""Calls a function as soon as a module is imported, at any later time and by any importer."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` once the module `name` has been imported; at once if it is imported already."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module through the other finders and wraps its loader to report the import."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def imported(self, module: ModuleType) -> None:
        """Remove this finder and run the callback, now that the module is imported."""
        sys.meta_path.remove(self)
        self._then(module)


class _Loader(importlib.abc.Loader):
    """Wraps the loader that the other finders returned, and notifies the `_Finder` after the import."""

    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        # Put the real loader back first: pickle, reload and libraries that read resources look it up.
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.imported(module)
