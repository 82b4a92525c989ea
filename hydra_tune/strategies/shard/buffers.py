"""The buffers of a model in shards: they stay on the device as the model's own tensors, and are a block in commits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hydra_tune.core.errors import CandidateError
from hydra_tune.spill.layout import Layout
from hydra_tune.spill.store import SpillFiles


class Buffers:
    """A model's buffers in one worker, and the blocks that they are stored in."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, Layout], files: SpillFiles) -> None:
        self._model = model
        self._blocks = blocks
        self._files = files
        self._stored: dict[str, tuple[torch.Tensor, int]] = {}
        """Each buffer and its version at the time when it was last equal to its block."""

    def load(self) -> None:
        """Load the buffers of the last commit."""
        present = self._present()
        for key, layout in self._blocks.items():
            if not layout.size or self._files.find(key) is None:
                continue
            block = torch.empty(layout.size, dtype=torch.uint8)
            self._files.read(key, block)
            with torch.no_grad():
                for name, tensor in layout.views(block).items():
                    present[name].copy_(tensor)
        self._note()

    def store(self, version: int) -> None:
        """Write buffers that have changed since they were loaded or stored; the next commit has them."""
        present = self._present()
        if all(name in self._stored and self._is_as_stored(name, present[name]) for name in present):
            return
        for key, layout in self._blocks.items():
            if layout.size:
                block = torch.empty(layout.size, dtype=torch.uint8)
                with torch.no_grad():
                    layout.fill(block, {field.name: present[field.name] for field in layout.fields})
                self._files.write(key, version, block)
        self._note()

    def _note(self) -> None:
        self._stored = {name: (tensor, tensor._version) for name, tensor in self._present().items()}

    def _is_as_stored(self, name: str, tensor: torch.Tensor) -> bool:
        known, version = self._stored[name]
        return known is tensor and version == tensor._version

    def _present(self) -> dict[str, torch.Tensor]:
        """Return the buffers that the trial began with; user code may have put other tensors in their place."""
        present = dict(self._model.named_buffers(remove_duplicate=False))
        for layout in self._blocks.values():
            for field in layout.fields:
                found = present.get(field.name)
                shape = None if found is None else tuple(found.shape)
                if found is None or shape != field.shape:
                    raise CandidateError(
                        f"buffer {field.name!r} changes its shape to {shape} in training",
                        "give it its final shape, or use --strategy whole",
                    )
                if found.dtype != field.dtype:
                    raise CandidateError(
                        f"buffer {field.name!r} changes its type to {found.dtype} in training",
                        "give it its final type, or use --strategy whole",
                    )
        return {field.name: present[field.name] for layout in self._blocks.values() for field in layout.fields}
