"""A tree of values and tensors in the spill store: written atomically, mapped by its readers."""

from __future__ import annotations

from typing import Any

import torch

from hydra_tune.core.state_tree import decode, encode
from hydra_tune.spill.layout import Layout
from hydra_tune.spill.store import SpillFiles

_BLOCK = "state"


def write_state(files: SpillFiles, tree: Any) -> int:
    """Make `tree` the committed state of these files; return the bytes of its tensors."""
    document, tensors = encode(tree)
    layout = Layout.of((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    block = torch.empty(layout.size, dtype=torch.uint8)
    layout.fill(block, tensors)
    files.write(_BLOCK, 0, block)
    files.commit({"document": document, "fields": [_described(name, tensor) for name, tensor in tensors.items()]})
    return layout.size


def read_state(files: SpillFiles) -> Any:
    """Return the tree written last, by any process. Its tensors are mapped from the file: copy those to keep."""
    files.reload()
    layout = Layout.of((name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in files.notes["fields"])
    return decode(files.notes["document"], layout.views(files.mapped(_BLOCK)))


def _described(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
