"""Encodes images in arrays, (rows, height, width) with channels first or last, as the numbers of a row.

One mean and one scale are learned. The interface is that of a table's encoder, so a predictor need not distinguish
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hydra_tune.automl.reading import Table
from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces.table import TableLayout

MOST_CHANNELS = 4


@dataclass(frozen=True)
class ImageEncoder:
    """Mean and scale of the training images."""

    mean: float
    scale: float

    @classmethod
    def learn(cls, images: np.ndarray) -> ImageEncoder:
        return cls(float(images.mean()), float(images.std()) or 1.0)

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Encode images as numbers, shape (rows, channels * height * width)."""
        flat = images.reshape(len(images), -1).astype(np.float32)
        return (flat - self.mean) / self.scale

    def names(self) -> dict[str, Any]:
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        return {"mean": np.array([self.mean]), "scale": np.array([self.scale])}

    @classmethod
    def restore(cls, arrays: dict[str, np.ndarray]) -> ImageEncoder:
        return cls(float(arrays["mean"][0]), float(arrays["scale"][0]))


def image_layout(shape: tuple[int, int, int], folds: int, rows: int) -> TableLayout:
    """Return the layout of images as rows."""
    return TableLayout(numbers=int(np.prod(shape)), image=shape, folds=folds, rows=rows)


def images_in(table: Table, target: str, name: str | None = None) -> tuple[str, np.ndarray]:
    """Return name and contents of the image array, channels first; by default the only array besides the target."""
    assert table.arrays is not None
    others = [key for key in table.arrays if key != target]
    if name is None and len(others) != 1:
        raise SpecError(
            f"{table.name} has the arrays {', '.join(others)}", "leave one array of images besides the target"
        )
    name = others[0] if name is None else name
    if name not in table.arrays:
        raise SpecError(f"{table.name} lacks the array {name!r}", "give images under the name that was fitted")
    images = table.arrays[name]
    if images.ndim not in (3, 4) or not len(images) or images.dtype.kind not in "buif":
        raise SpecError(
            f"the array {name!r} of {table.name} has the shape {images.shape} and type {images.dtype}",
            "give numbers of shape (rows, height, width), with channels first or last",
        )
    if not np.isfinite(images).all():
        raise SpecError(f"the array {name!r} of {table.name} has NaN or infinite values", "fill or drop such rows")
    if images.ndim == 3:
        return name, images[:, None]
    channels_last = images.shape[3] <= MOST_CHANNELS < images.shape[1]
    return name, np.moveaxis(images, 3, 1) if channels_last else images
