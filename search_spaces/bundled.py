"""Data sets that need no download: scikit-learn's bundled ones, and text from Python's own documentation.

All are small enough to train on in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hydra_tune.core.errors import SpecError, quoted
from hydra_tune.search_spaces.dataset import (
    VALID_FRACTION,
    Data,
    labelled,
    measured,
    regression_fields,
    split,
    spread,
)


def digits() -> Data:
    """Handwritten digits: 1,797 grey images of 8 x 8."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    train, valid = split(len(bunch.target), bunch.target)
    images = bunch.images[:, None]
    # One mean and deviation for the channel: single pixels at the border never vary.
    images = (images - images[train].mean()) / images[train].std()
    return Data(
        name="digits",
        task="classification",
        kind="image",
        train=labelled(images[train], bunch.target[train]),
        valid=labelled(images[valid], bunch.target[valid]),
        input_shape=(1, 8, 8),
        outputs=10,
        labels=tuple(str(name) for name in bunch.target_names),
    )


def breast_cancer() -> Data:
    """Breast cancer diagnosis: 569 rows of 30 measurements, 2 classes."""
    from sklearn.datasets import load_breast_cancer

    return _classes("breast_cancer", load_breast_cancer())


def wine() -> Data:
    """Wine cultivars: 178 rows of 13 measurements, 3 classes."""
    from sklearn.datasets import load_wine

    return _classes("wine", load_wine())


def _classes(name: str, bunch: Any) -> Data:
    train, valid = split(len(bunch.target), bunch.target)
    rows = (bunch.data - bunch.data[train].mean(axis=0)) / spread(bunch.data[train])
    return Data(
        name=name,
        task="classification",
        kind="features",
        train=labelled(rows[train], bunch.target[train]),
        valid=labelled(rows[valid], bunch.target[valid]),
        input_shape=rows.shape[1:],
        outputs=len(bunch.target_names),
        labels=tuple(str(label) for label in bunch.target_names),
    )


def diabetes() -> Data:
    """Diabetes progression after a year: 442 rows of 10 measurements, a regression."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes()
    train, valid = split(len(bunch.target))
    rows = (bunch.data - bunch.data[train].mean(axis=0)) / spread(bunch.data[train])
    fields = regression_fields(bunch.target, train, valid)
    targets = (bunch.target - fields["target_mean"]) / fields["target_scale"]
    return Data(
        name="diabetes",
        task="regression",
        kind="features",
        train=measured(rows[train], targets[train]),
        valid=measured(rows[valid], targets[valid]),
        input_shape=rows.shape[1:],
        outputs=1,
        **fields,
    )


def text(characters: int = 60_000, block: int = 64) -> Data:
    """Characters of Python's own documentation, in blocks; the target is the next character at each place.

    `characters` is how much of it to take, `block` the length of a block. The text differs a little between
    versions of Python. The validation part is the end of the text, since neighbouring blocks are similar.
    """
    from pydoc_data.topics import topics

    for name, value in (("characters", characters), ("block", block)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"data 'text' has {name} {quoted(value)}", "give a whole number of at least 1")
    source = "\n".join(topics[topic] for topic in sorted(topics))[:characters]
    vocabulary, codes = np.unique(list(source), return_inverse=True)
    blocks = (len(codes) - 1) // block
    held_out = round(VALID_FRACTION / 2 * blocks)
    if held_out < 1:
        raise SpecError(f"data 'text' has only {blocks} blocks of {block} characters", "take more, or shorter ones")
    stream = torch.as_tensor(codes[: blocks * block + 1], dtype=torch.long)
    inputs, targets = stream[:-1].view(blocks, block), stream[1:].view(blocks, block)
    return Data(
        name="text",
        task="language",
        kind="tokens",
        train=TensorDataset(inputs[:-held_out], targets[:-held_out]),
        valid=TensorDataset(inputs[-held_out:], targets[-held_out:]),
        input_shape=(block,),
        outputs=len(vocabulary),
        labels=tuple(str(character) for character in vocabulary),
    )


BUNDLED: Mapping[str, Callable[..., Data]] = {
    "digits": digits,
    "breast_cancer": breast_cancer,
    "wine": wine,
    "diabetes": diabetes,
    "text": text,
}
