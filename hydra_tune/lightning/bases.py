"""Lightning comes under two names, `pytorch_lightning` and `lightning.pytorch`, with classes of their own in each.

What the user's code has imported is what counts. Nothing is imported here that is not there already, unless there is
nothing at all.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from hydra_tune.errors import InputError

NAMES = ("lightning.pytorch", "pytorch_lightning")


def loaded() -> tuple[ModuleType, ...]:
    """The Lightnings that this process has imported; where it has none yet, the one that is installed."""
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
    """The Lightning that an object's class comes from."""
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
    """The class `kind` as a Callback of the Lightnings of these names: a Trainer looks at no other."""
    if (kind, names) not in _made:
        bases = (kind, *(importlib.import_module(name).Callback for name in names))
        facts = {"__module__": kind.__module__, "__doc__": kind.__doc__, "plain": kind}
        _made[kind, names] = type(kind.__name__, bases, facts)
    return _made[kind, names]
