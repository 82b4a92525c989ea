"""Supports both names of Lightning, `pytorch_lightning` and `lightning.pytorch`, whose classes are distinct.

The user's imports decide which is used. Lightning is imported here only if the process has not imported either.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from hydra_tune.core.errors import InputError

NAMES = ("lightning.pytorch", "pytorch_lightning")


def loaded() -> tuple[ModuleType, ...]:
    """Return the Lightning modules that this process has imported, or else the installed one."""
    found = tuple(module for name in NAMES if (module := sys.modules.get(name)) is not None)
    return found or (_installed(),)


def _installed() -> ModuleType:
    for name in reversed(NAMES):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise InputError("Lightning is not installed", "pip install 'hydra-tune[lightning]'")


def home_of(thing: object) -> ModuleType:
    """Return the Lightning module that an object's class comes from."""
    for module in loaded():
        kinds = (module.LightningModule, module.LightningDataModule, module.Trainer)
        if isinstance(thing, kinds):
            return module
    raise InputError(
        f"a {type(thing).__name__} is no LightningModule, LightningDataModule or Trainer",
        "give one of pytorch_lightning or lightning.pytorch",
    )


_made: dict[tuple[type, tuple[str, ...]], Any] = {}


def as_callback(kind: type, names: tuple[str, ...]) -> Any:
    """Return the class `kind` as a Callback of these Lightning modules, as a Trainer requires."""
    if (kind, names) not in _made:
        bases = (kind, *(importlib.import_module(name).Callback for name in names))
        facts = {"__module__": kind.__module__, "__doc__": kind.__doc__, "plain": kind}
        _made[kind, names] = type(kind.__name__, bases, facts)
    return _made[kind, names]
