"""Trained weights on disk: safetensors files, written whole or not at all. No pickle is read."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import load_model, save_model
from torch import nn

from hydra_tune.errors import InputError


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the model's parameters and buffers (tied ones once) so that `path` is always complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    save_model(model, str(unfinished))
    with open(unfinished, "rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load what `save_weights` wrote into a model of the same architecture."""
    try:
        missing, unexpected = load_model(model, str(path), strict=False)
    except FileNotFoundError as error:
        raise InputError(f"there are no weights at {path}", "run the search again, or choose another trial") from error
    except Exception as error:
        raise InputError(
            f"{path} is not a safetensors file of this model ({error})", "export the trial again"
        ) from error
    if missing or unexpected:
        names = ", ".join(sorted([*missing, *unexpected])[:3])
        raise InputError(
            f"{path} does not fit the model: {names} differ",
            "build must make the same model for the same parameters",
        )
