"""Converts training state (of optimizers, schedules, random generators) to JSON and tensors, without pickle.

`encode` takes apart a tree of plain values, containers, tensors and arrays; `decode` rebuilds the same tree, with
tuples as tuples and integer keys as integers. Unknown types are refused, so that no checkpoint is incomplete.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch

_CONTAINERS: dict[str, type[Any]] = {
    "tuple": tuple, "dict": dict, "Counter": Counter, "OrderedDict": OrderedDict, "deque": deque, "set": set
}  # fmt: skip
_MAPPINGS = ("dict", "Counter", "OrderedDict")


class NotStorable(Exception):
    """A value has a type that a checkpoint cannot hold."""


def encode(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the tree as a JSON document that refers to tensors by name, and the tensors."""
    tensors: dict[str, torch.Tensor] = {}
    return _encode(tree, tensors), tensors


def decode(document: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Rebuild the tree that `encode` took apart."""
    if isinstance(document, list):
        return [decode(each, tensors) for each in document]
    if not isinstance(document, dict):
        return document
    kind, value = document["is"], document["of"]
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy().astype(document["dtype"])
    if kind in _MAPPINGS:
        return _CONTAINERS[kind]({decode(k, tensors): decode(v, tensors) for k, v in value})
    return _CONTAINERS[kind](decode(each, tensors) for each in value)


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, torch.Tensor):
        return {"is": "tensor", "of": _add(value, tensors)}
    if isinstance(value, np.ndarray):
        # Stored as int64 or float64, because safetensors does not support every numpy dtype.
        wide = value.astype(np.int64 if value.dtype.kind in "iu" else np.float64)
        return {"is": "array", "of": _add(torch.from_numpy(wide), tensors), "dtype": str(value.dtype)}
    if isinstance(value, np.generic):
        return _encode(value.item(), tensors)
    if type(value) is list:
        return [_encode(each, tensors) for each in value]
    kind = type(value).__name__
    if _CONTAINERS.get(kind) is not type(value):
        raise NotStorable(f"a checkpoint cannot hold a {type(value).__module__}.{type(value).__qualname__}")
    if kind in _MAPPINGS:
        return {"is": kind, "of": [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    return {"is": kind, "of": [_encode(each, tensors) for each in value]}


def _add(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    name = str(len(tensors))
    # Copied, because safetensors refuses tensors that share memory.
    tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return name
