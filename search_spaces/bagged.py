"""Layers that hold one model for each fold of a table and train them all at once.

A small table is best judged by cross-validation, and its folds' models are small: one after another they would spend
their time in the interpreter. Here the weights of all folds are one tensor and a layer is one batched product, so that
five folds cost little more than one. Values have the shape (folds, ..., features); nothing passes from fold to fold.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from hydra_tune.search_spaces.table import UNSEEN, TableLayout


class BaggedLinear(nn.Module):
    """A dense layer for each fold."""

    def __init__(self, folds: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(max(inputs, 1))
        self.weight = nn.Parameter(torch.empty(folds, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(folds, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1, -2)
        return torch.unflatten(torch.baddbmm(self.bias, flat, self.weight), 1, x.shape[1:-1])


class BaggedNorm(nn.Module):
    """Layer normalisation with its own scale and shift for each fold; `middle` dimensions lie between."""

    def __init__(self, folds: int, width: int, middle: int) -> None:
        super().__init__()
        shape = (folds, *[1] * middle, width)
        self.scale = nn.Parameter(torch.ones(shape))
        self.shift = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:]) * self.scale + self.shift


class BaggedDropout(nn.Module):
    """Dropout with one mask for all folds, (folds, ...): folds stay independent, and drawing masks is the main cost."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.share:
            return x
        # The same operations in training and evaluation, so that a model with it can be captured and cut.
        return x * functional.dropout(torch.ones_like(x[:1]), self.share, self.training)


class Members(nn.Module):
    """Several ensemble members per fold, which see the features with different signs (TabM-mini).

    A fold's members share everything except this layer and the head (Gorishniy et al., arXiv 2410.24210). From (folds,
    rows, features) to (folds, members, rows, features).
    """

    def __init__(self, folds: int, members: int, features: int) -> None:
        super().__init__()
        signs = torch.randint(0, 2, (folds, members, 1, features)).float() * 2 - 1
        self.signs = nn.Parameter(signs if members > 1 else torch.ones_like(signs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(1) * self.signs


class MembersHead(nn.Module):
    """The last layer, one for each member; from (folds, members, rows, features) to (rows, folds, members, outputs)."""

    def __init__(self, folds: int, members: int, features: int, outputs: int) -> None:
        super().__init__()
        self.shape = (folds, members)
        self.linear = BaggedLinear(folds * members, features, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(self.linear(x.flatten(0, 1)), 0, self.shape).permute(2, 0, 1, 3)


class Periodic(nn.Module):
    """Numbers as waves of learned frequencies, then a dense layer that all columns share (Gorishniy et al. 2022).

    From (folds, rows, columns) to (folds, rows, columns, width).
    """

    def __init__(self, folds: int, columns: int, frequencies: int, sigma: float, width: int) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(folds, 1, columns, frequencies) * sigma)
        self.linear = BaggedLinear(folds, 2 * frequencies, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = 2 * math.pi * self.frequencies * x.unsqueeze(-1)
        return torch.relu(self.linear(torch.cat([angle.cos(), angle.sin()], dim=-1)))


class CategoryEmbeddings(nn.Module):
    """A vector for each code of each category column; from (folds, rows, columns) to (folds, rows, columns, width)."""

    def __init__(self, folds: int, categories: tuple[int, ...], width: int) -> None:
        super().__init__()
        starts = torch.tensor([sum(categories[:i]) for i in range(len(categories))])
        self.starts: torch.Tensor
        vectors = torch.randn(folds, sum(categories), width) / math.sqrt(max(width, 1))
        # An unseen category has no effect, until rare categories train its vector.
        vectors[:, starts + UNSEEN] = 0.0
        self.vectors = nn.Parameter(vectors)
        self.register_buffer("starts", starts, persistent=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return _looked_up(self.vectors, codes.long() + self.starts)


class TextEmbedding(nn.Module):
    """The mean of a vector for each word of a text; from (folds, rows, words) to (folds, rows, width)."""

    def __init__(self, folds: int, words: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(folds, words + 1, width) / math.sqrt(max(width, 1)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        there = (words > 0).to(words.dtype).unsqueeze(-1)
        vectors = _looked_up(self.vectors, words.long()) * there
        return vectors.sum(dim=-2) / there.sum(dim=-2).clamp(min=1.0)


class TableFeatures(nn.Module):
    """A table row as one vector of numbers (embedded or not), categories and texts.

    From (rows, folds, width) to (folds, rows, `features`).
    """

    def __init__(
        self, layout: TableLayout, *, quantiles: bool, periodic: int, sigma: float, category_width: int, text_width: int
    ) -> None:
        super().__init__()
        folds = layout.folds
        self.layout, self.quantiles = layout, quantiles
        self.features = layout.numbers
        if periodic and layout.numbers:
            self.periodic = Periodic(folds, layout.numbers, periodic, sigma, periodic)
            self.features += layout.numbers * periodic
        if layout.categories:
            self.categories = CategoryEmbeddings(folds, layout.categories, category_width)
            self.features += len(layout.categories) * category_width
        self.texts = nn.ModuleList(TextEmbedding(folds, words, text_width) for words, _ in layout.texts)
        self.features += len(layout.texts) * text_width
        self.embeds_numbers = bool(periodic and layout.numbers)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = rows.transpose(0, 1)
        numbers = x[..., self.layout.scaled(self.quantiles)]
        parts = [numbers]
        if self.embeds_numbers:
            parts.append(self.periodic(numbers).flatten(-2))
        if self.layout.categories:
            parts.append(self.categories(x[..., self.layout.codes()]).flatten(-2))
        parts += [embed(x[..., where]) for embed, where in zip(self.texts, self.layout.words(), strict=True)]
        return torch.cat(parts, dim=-1)


class PerFold(nn.Module):
    """An ordinary model for each fold, on the numbers of a row, reshaped to an image if they are one."""

    def __init__(self, models: list[nn.Module], layout: TableLayout) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.layout = layout

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        numbers = rows[..., self.layout.scaled(False)]
        inputs = numbers if self.layout.image is None else torch.unflatten(numbers, -1, self.layout.image)
        outputs = [model(inputs[:, fold]) for fold, model in enumerate(self.models)]
        return torch.stack(outputs, dim=1).unsqueeze(2)


def _looked_up(vectors: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Look up each fold's codes in its own list of vectors."""
    folds, known, width = vectors.shape
    offsets = torch.arange(folds, device=codes.device).reshape(-1, *[1] * (codes.dim() - 1)) * known
    return functional.embedding(codes + offsets, vectors.reshape(folds * known, width))
