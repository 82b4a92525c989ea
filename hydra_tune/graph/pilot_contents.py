"""Undoes what a pilot batch does to the contents of attributes: tensors changed in place, lists appended to, random
generators drawn from."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

CONTAINERS = (list, dict, set, deque)


@contextmanager
def contents_restored(*models: nn.Module) -> Iterator[None]:
    """Restore, on leaving, the contents of tensors and containers that modules have as plain attributes or buffers."""
    kept: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for name, value in (*vars(module).items(), *module._buffers.items()):
                if (name.startswith("_") and name in nn.Module().__dict__) or id(value) in seen:
                    continue
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    kept.append((value, value.detach().clone()))
                elif type(value) in CONTAINERS:
                    kept.append((value, value.copy()))
                elif isinstance(value, torch.Generator):
                    kept.append((value, value.get_state()))
                elif isinstance(value, random.Random):
                    kept.append((value, value.getstate()))
                elif isinstance(value, np.random.Generator):
                    kept.append((value, copy.deepcopy(value.bit_generator.state)))
                seen.add(id(value))
    try:
        yield
    finally:
        for value, before in kept:
            _restore(value, before)


def _restore(value: Any, before: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.shape == before.shape and not torch.equal(value, before):
            with torch.no_grad():
                value.copy_(before)
        return
    if isinstance(value, torch.Generator):
        value.set_state(before)
        return
    if isinstance(value, random.Random):
        value.setstate(before)
        return
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = before
        return
    value.clear()
    if isinstance(value, dict | set):
        value.update(before)
    else:
        value.extend(before)
