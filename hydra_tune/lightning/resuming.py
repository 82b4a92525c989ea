"""Checkpoints of a Trainer in the project's own format, and a Trainer that goes on from one.

Lightning's own files are pickles, which the project never reads. The contents are Lightning's: a Trainer makes them in
`save_checkpoint` and hands them to whatever stands for its checkpoint files. They are written as safetensors and JSON.

A checkpoint is taken where an epoch begins: there is no position in the data then, and with the random streams in it
the epoch's batches come in the same order again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hydra_tune.checkpoint import CHECKPOINT_SHARE, Checkpoints
from hydra_tune.loaders import generator_of
from hydra_tune.seeds import RandomState

_NOT_NEEDED = ("hyper_parameters", "hparams_name", "hparams_type")
"""What the user's code gives again when it makes the module, and may be of any type."""


class _Caught:
    """Stands for a strategy's checkpoint files, and keeps what was to be written."""

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
        """Whether it is time: now and then, and less often where writing takes a larger share of the time."""
        return time.monotonic() - self._made > max(self._every, self._took / CHECKPOINT_SHARE)

    def save(self, trainer: Any) -> tuple[int, int, float] | str:
        """Write the state; every rank calls, rank 0 writes. Returns step, bytes and seconds, or why it was not."""
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
        """Delete them: they are of no use."""
        self._files.remove()

    def newest(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """The newest state that is whole, and what was found damaged."""
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
    # The epoch that is about to begin counts as ready already, and will be counted again.
    progress = contents["loops"]["fit_loop"]["epoch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["ready"] -= 1
    generators = [generator.get_state() for generator in _generators(trainer)]
    random = RandomState.capture(strategy.root_device).state()
    return {"lightning": contents, "random": random, "generators": generators}


def go_on(trainer: Any, module: Any, state: dict[str, Any]) -> None:
    """Give a Trainer that has set everything up, and not begun, the state of a checkpoint."""
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
    # Not in the middle of an epoch: the loops begin one.
    trainer.fit_loop.restarting = False
    RandomState.from_state(state["random"]).restore(strategy.root_device)


def restore_generators(trainer: Any, states: list[torch.Tensor]) -> None:
    """Put the loaders' own generators where they were, once the Trainer has its loaders."""
    for generator, state in zip(_generators(trainer), states, strict=True):
        generator.set_state(state)
        if trainer.train_dataloader.generator is not None:
            # The epoch's iterator is made already. In an unbroken run it is made now, and draws its workers' seed.
            torch.empty((), dtype=torch.int64).random_(generator=generator)


def _generators(trainer: Any) -> list[torch.Generator]:
    """The one that the training loader or its sampler was given, if any; else they draw from the process's stream."""
    loader = trainer.train_dataloader
    generator = generator_of(loader) if isinstance(loader, DataLoader) else None
    return [] if generator is None else [generator]
