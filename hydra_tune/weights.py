"""Trained weights on disk: safetensors files, written whole or not at all. No pickle is read."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from hydra_tune.errors import HydraTuneError, InputError


class NoRoom(HydraTuneError):
    """Weights could not be written: the search stops, and can be resumed when there is room."""


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the model's parameters and buffers (tied ones once) so that `path` is always complete."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_model(model, str(unfinished))
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        raise NoRoom(
            f"weights of {size} bytes cannot be written to {path} ({error})",
            "make room there and resume the study; the trial goes on from its checkpoint",
        ) from error


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
