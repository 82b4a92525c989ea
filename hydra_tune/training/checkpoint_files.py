"""Files of one trial's checkpoints: names, steps and removal; `checkpoint.py` reads and writes them.

The coordinator, which never touches tensors, removes the checkpoints of trials that have ended.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

CHECKPOINT_SHARE = 0.02
"""Largest share of time for writing checkpoints; slower ones are made less often."""

_STEP = re.compile(r"step-([0-9]{1,18})\.json")


class CheckpointFiles:
    """The checkpoint files of one trial, in a separate directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def remove(self) -> None:
        """Delete all checkpoints of the trial."""
        if self.directory.exists():
            shutil.rmtree(self.directory, ignore_errors=True)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, complete or not, in order."""
        names = (_STEP.fullmatch(file.name) for file in self.directory.glob("step-*.json"))
        return sorted(int(match[1]) for match in names if match)  # others put copies beside them, as for a conflict

    def files(self, step: int) -> tuple[Path, Path]:
        """Return the safetensors file and the JSON file of a step."""
        return self.directory / f"step-{step}.safetensors", self.directory / f"step-{step}.json"

    def remove_step(self, step: int) -> None:
        """Delete the checkpoint of one step."""
        # The JSON first: without it the other file is ignored.
        for file in reversed(self.files(step)):
            file.unlink(missing_ok=True)
