"""Checkpoints of one trial on disk: written atomically, checked when read, the last two kept.

A checkpoint is a safetensors file and a JSON file of the same name. The JSON is written last and holds the checksum of
both: a checkpoint is complete if the JSON exists and the checksum matches. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from hydra_tune.core.errors import HydraTuneError
from hydra_tune.core.state_tree import decode, encode
from hydra_tune.training.checkpoint_files import CheckpointFiles

KEPT = 2
FORMAT = 1


class CheckpointError(HydraTuneError):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class Checkpoint:
    """A state read from disk, and the damaged checkpoints that were skipped."""

    step: int
    state: Any
    damaged: tuple[str, ...]


class Checkpoints(CheckpointFiles):
    """The checkpoints of one trial, in a separate directory."""

    def save(self, step: int, state: Any) -> int:
        """Write the state at `step` and remove all but the last two; return the bytes written."""
        document, tensors = encode(state)
        data = save(tensors)
        digest = _digest(step, document, data)
        facts = {"format": FORMAT, "step": step, "sha256": digest, "bytes": len(data), "state": document}
        text = json.dumps(facts).encode()
        tensors_file, facts_file = self.files(step)
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
        for old in self.steps()[:-KEPT]:
            self.remove_step(old)
        return len(data) + len(text)

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint; None if there is none."""
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                state = self._load(step)
                return Checkpoint(step, state, tuple(f"{note}; that of step {step} is used" for note in damaged))
            except Exception as error:  # noqa: BLE001 - whatever a damaged file makes its reader raise
                reason = str(error) or type(error).__name__
                damaged.append(f"the checkpoint of step {step} is damaged ({reason})")
        if damaged:
            return Checkpoint(-1, None, (*damaged[:-1], f"{damaged[-1]}; no other is left, and the trial starts again"))
        return None

    def _load(self, step: int) -> Any:
        tensors_file, facts_file = self.files(step)
        facts = json.loads(facts_file.read_bytes())
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']} is not {FORMAT}")
        data = tensors_file.read_bytes()
        if _digest(facts["step"], facts["state"], data) != facts["sha256"]:
            raise ValueError("checksum mismatch")
        return decode(facts["state"], load(data))


def _digest(step: int, document: Any, data: bytes) -> str:
    """Return the checksum of both files: the JSON matters as much as the tensors."""
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
    """Sync the directory, so that new file names are durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
