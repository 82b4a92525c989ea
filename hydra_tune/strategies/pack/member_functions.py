"""Functions that a pack computes in another way than one model: those that draw random numbers, and attention.

`MemberFunctions` puts them into torch's namespaces while the batched forward runs. Any other function that draws random
numbers is refused by vmap itself, so that a trial never depends on who shares its pack.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from hydra_tune.strategies.pack.numbers import Varying, values_of
from hydra_tune.strategies.pack.refusal import CannotPack
from hydra_tune.strategies.pack.streams import Streams

ALPHA = 1.7580993408473766
"""Constant of alpha dropout, as in torch."""
_cross_entropy_of_torch = F.cross_entropy


class _EachMember(torch.autograd.Function):
    """Brings a tensor with a row for each member, made outside of vmap, into the batched forward."""

    @staticmethod
    def forward(index: torch.Tensor, like: torch.Tensor, rows: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        raise AssertionError("called in a batched forward only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: no gradient flows back."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, index: torch.Tensor, like: torch.Tensor, rows: Any) -> Any:
        members = like.movedim(in_dims[1], 0) if in_dims[1] is not None else like.expand(info.batch_size, *like.shape)
        return rows(members), 0


_each: Callable[[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
_each = _EachMember.apply


class MemberFunctions:
    """The replaced functions, which draw from the members' streams and read the members' numbers."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.index = torch.empty(0)
        """The member's position, as the batched forward sees it."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the functions in place; the fused kernels of transformers, which have no batched form, are off."""
        before = [(space, name, getattr(space, name)) for space, name, _ in REPLACED]
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            for space, name, replacement in REPLACED:
                setattr(space, name, functools.partial(replacement, self))
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for space, name, function in before:
                setattr(space, name, function)

    def each(self, like: torch.Tensor, fill: Callable[..., Any], shape: Any = None) -> torch.Tensor:
        """Return what each member draws for this tensor, or for a tensor of this shape.

        Some kernels draw in the order of memory, so that a drawn tensor needs the strides of the one it is for.
        """

        def rows(members: torch.Tensor) -> torch.Tensor:
            made = torch.empty_like(members) if shape is None else members.new_empty((len(members), *shape))
            return self.streams.drawn(made, fill)

        return _each(self.index, like.detach(), rows)

    def numbers(self, number: float | Varying, like: torch.Tensor) -> torch.Tensor:
        """Return the number of each member as a tensor without dimensions."""
        values = values_of(number, len(self.streams.generators))

        def rows(_members: torch.Tensor) -> torch.Tensor:
            return torch.tensor(values, dtype=like.dtype, device=like.device)

        return _each(self.index, like.detach(), rows)

    def probabilities(self, p: float | Varying) -> tuple[float, ...]:
        values = values_of(p, len(self.streams.generators))
        if not all(0 <= value <= 1 for value in values):
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {values}")
        return values


def _dropped(members: MemberFunctions, x: torch.Tensor, p: Any, shape: Any, inplace: bool) -> torch.Tensor:
    """Multiply by the mask of each member, scaled as torch scales it."""
    ps = members.probabilities(p)
    if not any(ps) or not x.numel():
        return x

    def fill(row: torch.Tensor, member: int, generator: torch.Generator) -> None:
        if ps[member] in (0.0, 1.0):
            row.fill_(1.0 - ps[member])  # torch draws nothing then
        else:
            row.bernoulli_(1 - ps[member], generator=generator).div_(1 - ps[member])

    noise = members.each(x, fill, shape)
    return x.mul_(noise) if inplace else x * noise


def _dropout(
    members: MemberFunctions, input: torch.Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return _dropped(members, input, p, None, inplace) if training else input


def _feature_dropout(dimensions: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    def dropout(
        members: MemberFunctions, input: torch.Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if input.dim() not in dimensions:
            raise CannotPack(f"dropout of whole channels has a tensor of {input.dim()} dimensions")
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
        return _dropped(members, input, p, shape, inplace) if training else input

    return dropout


def _alpha_dropout(
    members: MemberFunctions, input: torch.Tensor, p: Any = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    if not training:
        return input
    ps = members.probabilities(p)
    if any(value in (0.0, 1.0) for value in ps):
        raise CannotPack("alpha dropout has a probability of 0 or 1")

    def fill(row: torch.Tensor, member: int, generator: torch.Generator) -> None:
        row.bernoulli_(1 - ps[member], generator=generator)

    kept = members.each(input, fill)
    a = [1.0 / math.sqrt((ALPHA * ALPHA * each + 1) * (1 - each)) for each in ps]
    scale = members.numbers(Varying(a), input)
    shift = members.numbers(Varying([ALPHA * each * p for each, p in zip(a, ps, strict=True)]), input)
    return input * (kept * scale) + ((kept - 1) * (ALPHA * scale) + shift)


def _attention(
    members: MemberFunctions,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as matrix products: torch's kernels for it have no batched form."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, -1)
    if attn_mask is not None:
        # A row without anything to attend to is zero, as in torch.
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return _dropout(members, weights, dropout_p) @ value


def _cross_entropy(
    members: MemberFunctions,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: Any = 0.0,
) -> torch.Tensor:
    """Cross entropy with the label smoothing of each member."""
    loss = functools.partial(
        _cross_entropy_of_torch, input, target, weight, size_average, ignore_index, reduce, reduction
    )
    if not isinstance(label_smoothing, Varying):
        return loss(label_smoothing=label_smoothing)
    share = members.numbers(label_smoothing, input)
    return (1 - share) * loss() + share * loss(label_smoothing=1.0)


def _rand(draw: str) -> Callable[..., torch.Tensor]:
    def like(members: MemberFunctions, input: torch.Tensor, **named: Any) -> torch.Tensor:
        if any(named.get(key) is not None for key in ("dtype", "device", "memory_format")):
            raise CannotPack(f"its code draws with torch.{draw}_like of another type")

        def fill(row: torch.Tensor, member: int, generator: torch.Generator) -> None:
            row.uniform_(0, 1, generator=generator) if draw == "rand" else row.normal_(0, 1, generator=generator)

        return members.each(input, fill)

    return like


REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (F, "dropout", _dropout),
    (torch, "dropout", _dropout),
    (F, "dropout1d", _feature_dropout((3,))),
    (F, "dropout2d", _feature_dropout((3, 4))),
    (F, "dropout3d", _feature_dropout((5,))),
    (F, "alpha_dropout", _alpha_dropout),
    (F, "scaled_dot_product_attention", _attention),
    (F, "cross_entropy", _cross_entropy),
    (torch, "rand_like", _rand("rand")),
    (torch, "randn_like", _rand("randn")),
)
"""Replaced functions: the namespace, the name, and the function, which takes the members first."""
