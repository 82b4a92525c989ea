"""A trial's state in one file in the run's directory, replaced whole: what a lost worker is made anew from.

Unlike a checkpoint it is written every other second and never outlives its run, so it is neither synced nor checked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save

from hydra_tune.engine.spill import write_whole
from hydra_tune.state_tree import decode, encode


def write_commit(path: Path, state: Any) -> int:
    """Replace the state; a reader finds the old one or the new one. Returns its bytes."""
    document, tensors = encode(state)
    content = save(tensors, metadata={"state": json.dumps(document)})
    unfinished = path.with_name(path.name + ".tmp")
    write_whole(unfinished, content)
    os.replace(unfinished, path)
    return len(content)


def read_commit(path: Path) -> Any:
    """The state that was written last; None where there is none."""
    if not path.exists():
        return None
    with safe_open(str(path), framework="pt") as file:
        document = json.loads(file.metadata()["state"])
        return decode(document, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
