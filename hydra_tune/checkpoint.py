"""Checkpoints of one trial on disk: written whole or not at all, checked when read, the last two kept.

A checkpoint is a safetensors file and a JSON file of the same name. The JSON is written last and holds the checksum of
both: where it is there and the checksum is right, the checkpoint is whole. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from hydra_tune.errors import HydraTuneError
from hydra_tune.state_tree import decode, encode

KEPT = 2
FORMAT = 1
CHECKPOINT_SHARE = 0.02
"""Checkpoints are made less often where writing them would take more than this share of the time."""


class CheckpointError(HydraTuneError):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class Checkpoint:
    """A state that was read back, and what was found damaged on the way to it."""

    step: int
    state: Any
    damaged: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one trial, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, step: int, state: Any) -> int:
        """Write the state at `step`; older ones than the last two go. Returns the bytes written."""
        document, tensors = encode(state)
        data = save(tensors)
        digest = _digest(step, document, data)
        facts = {"format": FORMAT, "step": step, "sha256": digest, "bytes": len(data), "state": document}
        text = json.dumps(facts).encode()
        tensors_file, facts_file = self._files(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(tensors_file, data)
            _write(facts_file, text)
            _sync_directory(self.directory)
        except OSError as error:
            for file in (tensors_file, facts_file):
                file.with_name(file.name + ".tmp").unlink(missing_ok=True)
            size = len(data) + len(text)
            raise CheckpointError(
                f"a checkpoint of {size} bytes cannot be written to {self.directory} ({error.strerror})",
                "make room there; the checkpoint before it is intact, and the study can be resumed",
            ) from error
        for old in self._steps()[:-KEPT]:
            self._remove(old)
        return len(data) + len(text)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None where there is none."""
        damaged: list[str] = []
        for step in reversed(self._steps()):
            try:
                state = self._load(step)
                return Checkpoint(step, state, tuple(f"{note}; that of step {step} is used" for note in damaged))
            except (OSError, ValueError, KeyError, TypeError) as error:
                damaged.append(f"the checkpoint of step {step} is damaged ({error})")
        if damaged:
            return Checkpoint(-1, None, (*damaged[:-1], f"{damaged[-1]}; no other is left, and the trial starts again"))
        return None

    def remove(self) -> None:
        """Delete them all: the trial has ended."""
        if self.directory.exists():
            shutil.rmtree(self.directory, ignore_errors=True)

    def _load(self, step: int) -> Any:
        tensors_file, facts_file = self._files(step)
        facts = json.loads(facts_file.read_bytes())
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']} is not {FORMAT}")
        data = tensors_file.read_bytes()
        if _digest(facts["step"], facts["state"], data) != facts["sha256"]:
            raise ValueError("checksum mismatch")
        return decode(facts["state"], load(data))

    def _steps(self) -> list[int]:
        return sorted(int(file.stem.removeprefix("step-")) for file in self.directory.glob("step-*.json"))

    def _files(self, step: int) -> tuple[Path, Path]:
        return self.directory / f"step-{step}.safetensors", self.directory / f"step-{step}.json"

    def _remove(self, step: int) -> None:
        # The JSON first: without it the other file is nothing.
        for file in reversed(self._files(step)):
            file.unlink(missing_ok=True)


def _digest(step: int, document: Any, data: bytes) -> str:
    """Over both halves: the rate and the position in the JSON matter as much as the tensors."""
    digest = hashlib.sha256(data)
    digest.update(json.dumps([step, document]).encode())
    return digest.hexdigest()


def _write(path: Path, data: bytes) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _sync_directory(directory: Path) -> None:
    """Make the new names themselves durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
