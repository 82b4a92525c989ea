"""A tree of values and tensors in the spill store: written whole or not at all, mapped by whoever reads it."""

from __future__ import annotations

from typing import Any

import torch

from hydra_tune.engine.spill import SpillFiles
from hydra_tune.shards.layout import Layout
from hydra_tune.state_tree import decode, encode

_BLOCK = "state"


def write_state(files: SpillFiles, tree: Any) -> int:
    """Make `tree` the state of these files. Returns its tensors' bytes."""
    document, tensors = encode(tree)
    layout = Layout.of((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    block = torch.empty(layout.size, dtype=torch.uint8)
    layout.fill(block, tensors)
    files.write(_BLOCK, 0, block)
    files.commit({"document": document, "fields": [_described(name, tensor) for name, tensor in tensors.items()]})
    return layout.size


def read_state(files: SpillFiles) -> Any:
    """The tree that was written last, by any process. Its tensors are the file's own pages: copy what is to stay."""
    files.reload()
    layout = Layout.of((name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in files.notes["fields"])
    return decode(files.notes["document"], layout.views(files.mapped(_BLOCK)))


def _described(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
