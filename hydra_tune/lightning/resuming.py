"""Checkpoints of a Trainer in the project's own format, and resuming a Trainer from one.

Lightning's own files are pickles, which the project never reads. The contents are Lightning's: a Trainer passes them in
`save_checkpoint` to its checkpoint plugin. They are written as safetensors and JSON.

A checkpoint is taken at the beginning of an epoch: there is no position in the data then, and with the random states
saved the epoch's batches come in the same order again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hydra_tune.core.random_state import RandomState
from hydra_tune.training.checkpoint import Checkpoints
from hydra_tune.training.checkpoint_files import CHECKPOINT_SHARE
from hydra_tune.training.loaders import generator_of

_NOT_NEEDED = ("hyper_parameters", "hparams_name", "hparams_type")
"""Contents that the user's code supplies again when it makes the module, and that may be of any type."""


class _Caught:
    """Replaces a strategy's checkpoint plugin, and keeps the contents instead of writing them."""

    def __init__(self) -> None:
        self.contents: dict[str, Any] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], _path: Any, storage_options: Any = None) -> None:
        self.contents = checkpoint


class TrainerCheckpoints:
    """The checkpoints of one fit."""

    def __init__(self, directory: Path, every: float) -> None:
        self._files = Checkpoints(directory)
        self._every = every
        self._made = time.monotonic()
        self._took = 0.0

    def due(self) -> bool:
        """True if a checkpoint is due: periodically, and less often if writing takes a larger share of the time."""
        return time.monotonic() - self._made > max(self._every, self._took / CHECKPOINT_SHARE)

    def save(self, trainer: Any) -> tuple[int, int, float] | str:
        """Write the state; all ranks call, rank 0 writes. Return step, bytes and seconds, or the reason for failure."""
        began = time.monotonic()
        try:
            state = _state_of(trainer)
            if state is None:
                return f"{type(trainer.strategy).__name__} keeps its state in a form of its own"
            size = self._files.save(trainer.global_step, state)
        except Exception as error:  # noqa: BLE001 - user code may keep anything in a checkpoint; training is worth more
            return str(error) or type(error).__name__
        finally:
            self._made = time.monotonic()
        self._took = time.monotonic() - began
        return trainer.global_step, size, self._took

    def remove(self) -> None:
        """Delete the checkpoints."""
        self._files.remove()

    def newest(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Return the newest undamaged state, and notes on damaged ones."""
        found = self._files.newest()
        return (None, ()) if found is None else (found.state, found.damaged)


def _state_of(trainer: Any) -> dict[str, Any] | None:
    caught, strategy = _Caught(), trainer.strategy
    files = strategy.checkpoint_io
    strategy.checkpoint_io = caught
    try:
        trainer.save_checkpoint("hydra-tune", weights_only=False)
    finally:
        strategy.checkpoint_io = files
    if caught.contents is None:
        return None
    contents = {key: value for key, value in caught.contents.items() if key not in _NOT_NEEDED}
    # The epoch about to begin is counted as ready already, and would be counted again.
    progress = contents["loops"]["fit_loop"]["epoch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["ready"] -= 1
    generators = [generator.get_state() for generator in _generators(trainer)]
    random = RandomState.capture(strategy.root_device).state()
    return {"lightning": contents, "random": random, "generators": generators}


def go_on(trainer: Any, module: Any, state: dict[str, Any]) -> None:
    """Load a checkpoint into a Trainer that is set up but has not begun."""
    contents, strategy = state["lightning"], trainer.strategy
    module.on_load_checkpoint(contents)
    strategy.load_model_state_dict(contents, strict=module.strict_loading)
    if trainer.datamodule is not None and type(trainer.datamodule).__qualname__ in contents:
        trainer.datamodule.load_state_dict(contents[type(trainer.datamodule).__qualname__])
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, contents)
        if callback.state_key in contents["callbacks"]:
            callback.load_state_dict(contents["callbacks"][callback.state_key])
    precision = trainer.precision_plugin
    precision.on_load_checkpoint(contents)
    if type(precision).__qualname__ in contents:
        precision.load_state_dict(contents[type(precision).__qualname__])
    strategy.load_optimizer_state_dict(contents)
    for config, schedule in zip(trainer.lr_scheduler_configs, contents["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(schedule)
    trainer.fit_loop.load_state_dict(contents["loops"]["fit_loop"])
    # Start an epoch rather than resume within one.
    trainer.fit_loop.restarting = False
    RandomState.from_state(state["random"]).restore(strategy.root_device)


def restore_generators(trainer: Any, states: list[torch.Tensor]) -> None:
    """Restore the states of the loaders' generators, once the Trainer has its loaders."""
    for generator, state in zip(_generators(trainer), states, strict=True):
        generator.set_state(state)
        if trainer.train_dataloader.generator is not None:
            # The epoch's iterator exists already. In an unbroken run it is made now, and draws its workers' seed.
            torch.empty((), dtype=torch.int64).random_(generator=generator)


def _generators(trainer: Any) -> list[torch.Generator]:
    """Return the generator of the training loader or its sampler, if any; otherwise they use the process's stream."""
    loader = trainer.train_dataloader
    generator = generator_of(loader) if isinstance(loader, DataLoader) else None
    return [] if generator is None else [generator]
