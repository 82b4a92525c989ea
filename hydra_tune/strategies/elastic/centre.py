"""The centre of an elastic trial: its tensors in the spill store, in shards, each exchanged under a lock.

An exchange reads a shard, changes it and commits it before it releases the lock. A client killed during an exchange
leaves the shard at its last commit: the centre is never half written, and the kernel releases the lock. With several
shards clients can exchange different ones at the same time; each shard is consistent by itself.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from hydra_tune.spill.layout import Layout
from hydra_tune.spill.store import SpillFiles

Rule: TypeAlias = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns a client's new value from a tensor's name, the client's value and the centre's, which it changes in place."""

_BLOCK = "centre"


def shards_of(tensors: Mapping[str, torch.Tensor], count: int) -> tuple[Layout, ...]:
    """Divide tensors into `count` shards of about equal bytes: largest first, each to the smallest shard."""
    sizes = [0] * count
    names: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(tensors, key=lambda each: -tensors[each].nbytes):
        least = sizes.index(min(sizes))
        sizes[least] += tensors[name].nbytes
        names[least].append(name)
    described = ([(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in some] for some in names if some)
    return tuple(Layout.of(some) for some in described)


class Centre:
    """The tensors that clients exchange with; any process may open it."""

    def __init__(self, places: Sequence[Path], name: str, layouts: Sequence[Layout]) -> None:
        self.layouts = tuple(layouts)
        self.files = [SpillFiles(places, f"{name}/centre-{index}") for index in range(len(layouts))]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(field.size for layout in self.layouts for field in layout.fields)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the centre to these tensors."""
        for layout, files in zip(self.layouts, self.files, strict=True):
            block = torch.empty(layout.size, dtype=torch.uint8)
            layout.fill(block, tensors)
            with _locked(files):
                files.reload()
                files.write(_BLOCK, 0, block)
                files.commit({"exchanges": (files.notes or {"exchanges": 0})["exchanges"]})

    def read(self) -> dict[str, torch.Tensor]:
        """Return a consistent copy of all tensors."""
        found: dict[str, torch.Tensor] = {}
        with ExitStack() as locks:
            for files in self.files:
                locks.enter_context(_locked(files))
            for layout, files in zip(self.layouts, self.files, strict=True):
                files.reload()
                found |= layout.views(_block(files, layout))
        return found

    def exchange(self, own: Mapping[str, torch.Tensor], rule: Rule) -> int:
        """Exchange a client's tensors with the centre by `rule`. Return the bytes read and written."""
        moved = 0
        for layout, files in zip(self.layouts, self.files, strict=True):
            with _locked(files):
                files.reload()
                block = _block(files, layout)
                views = layout.views(block)
                changed = {name: rule(name, own[name].detach().cpu(), views[name]) for name in views}
                files.write(_BLOCK, 0, block)
                files.commit({"exchanges": files.notes["exchanges"] + 1})
            with torch.no_grad():
                for name, value in changed.items():
                    own[name].copy_(value)
            moved += 2 * sum(field.size for field in layout.fields)
        return moved

    def exchanges(self) -> int:
        """Return the number of exchanges so far."""
        self.files[0].reload()
        count: int = self.files[0].notes["exchanges"]
        return count


def _block(files: SpillFiles, layout: Layout) -> torch.Tensor:
    block = torch.empty(layout.size, dtype=torch.uint8)
    files.read(_BLOCK, block)
    return block


@contextmanager
def _locked(files: SpillFiles) -> Iterator[None]:
    """Hold the lock of these files; the kernel releases the lock of a killed process."""
    files.places[0].mkdir(parents=True, exist_ok=True)
    with open(files.places[0] / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
