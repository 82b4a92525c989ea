"""The initial masks of a network, and a check that a candidate can be trained pruned."""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from hydra_tune.core.errors import CandidateError, quoted
from hydra_tune.strategies.sparse.masks import Masks, given_masks, magnitude_masks, prunable, random_masks
from hydra_tune.strategies.sparse.pruning import MASKS, Pruning

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD,
)  # fmt: skip
"""Optimizers that treat each weight by itself, so that a survivor's step does not depend on other weights."""


def first_masks(model: nn.Module, pruning: Pruning, seed: int) -> Masks | None:
    """Return the masks if they are known before training; None if they must be searched for."""
    if pruning.mask not in MASKS:
        return given_masks(model, _read(pruning.mask))
    if not prunable(model):
        raise CandidateError(
            "the model has no weights that could be pruned",
            "linear layers, convolutions and attention are; for others give a mask of your own",
        )
    if pruning.mask == "random":
        return random_masks(model, pruning.sparsity, pruning.least, seed)
    if pruning.mask == "magnitude" or pruning.dense_epochs == 0:
        return magnitude_masks(model, pruning.sparsity, pruning.least)
    return None


def check_candidate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise CandidateError if a candidate cannot be trained pruned."""
    if not isinstance(optimizer, ELEMENTWISE):
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise CandidateError(f"strategy 'sparse' cannot use {type(optimizer).__name__}", f"it knows {names}")
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) > 1:
        listing = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise CandidateError(
            f"the model's parameters are of several types ({listing})", "give it one, as model.float()"
        )


def _read(path: str) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CandidateError(
            f"the masks in {quoted(path)} cannot be read ({error})", "give a safetensors file"
        ) from error
