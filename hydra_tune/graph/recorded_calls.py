"""Records calls of modules and functions with a backward of their own, which torch does not show by itself."""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from hydra_tune.graph.recorder import Recorder


def assigned(tensor: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    """Assign to a part of a tensor, and return the tensor."""
    tensor[at] = value
    return tensor


class Applied:
    """Calls a function with a backward of its own."""

    def __init__(self, kind: type[torch.autograd.Function]) -> None:
        self.kind = kind
        self.__name__ = kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Applied) and other.kind is self.kind

    def __hash__(self) -> int:
        return hash(self.kind)


@contextmanager
def calls_of_modules(recorder: Recorder) -> Iterator[None]:
    """Show the recorder each call of a module of the model, within the block."""
    original: Any = nn.Module.__call__
    names = recorder.names

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(module))
        if not recorder.recording or name is None:
            return original(module, *args, **kwargs)
        if name and recorder.is_leaf(module, name):
            return recorder.called(module, name, original, args, kwargs)
        recorder.path.append(name)
        try:
            return original(module, *args, **kwargs)
        except Exception:
            recorder.failed_in = recorder.failed_in or name
            raise
        finally:
            recorder.path.pop()

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


@contextmanager
def einops_called(recorder: Recorder) -> Iterator[None]:
    """Show the recorder each call of einops, within the block: einops plans its work by sizes, in Python."""
    einops: Any = sys.modules.get("einops.einops")
    original = getattr(einops, "_apply_recipe", None)
    if original is None:
        yield
        return

    def apply(*args: Any, **kwargs: Any) -> Any:
        if not recorder.recording:
            return original(*args, **kwargs)
        return recorder.function(original, args, kwargs)

    einops._apply_recipe = apply
    try:
        yield
    finally:
        einops._apply_recipe = original


@contextmanager
def lengths_seen(recorder: Recorder) -> Iterator[None]:
    """Let `len` of a tensor give the recorder's size, within the block: torch returns a plain int."""
    original = builtins.len

    def length(thing: Any, /) -> int:
        if recorder.recording and isinstance(thing, torch.Tensor) and thing.dim():
            return thing.size(0)
        return original(thing)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = original


@contextmanager
def own_gradients(recorder: Recorder) -> Iterator[None]:
    """Show the recorder each call of a function with a backward of its own, within the block."""
    original: Any = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.utils.checkpoint saves its inputs by a function that does nothing else.
        if not recorder.recording or cls.__name__ == "_NoopSaveInputs":
            return original.__func__(cls, *args, **kwargs)
        return recorder.applied(cls, original.__func__, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
