"""A trial's state in one file in the run's directory, replaced atomically; a lost worker is restored from it.

Unlike a checkpoint it is written every other second and never outlives its run, so it is neither synced nor checked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save

from hydra_tune.core.state_tree import decode, encode
from hydra_tune.spill.places import write_whole


def write_commit(path: Path, state: Any) -> int:
    """Replace the state atomically: a reader finds the old one or the new one. Return its bytes."""
    document, tensors = encode(state)
    content = save(tensors, metadata={"state": json.dumps(document)})
    unfinished = path.with_name(path.name + ".tmp")
    write_whole(unfinished, content)
    os.replace(unfinished, path)
    return len(content)


def read_commit(path: Path) -> Any:
    """Return the state written last; None if there is none."""
    if not path.exists():
        return None
    with safe_open(str(path), framework="pt") as file:
        document = json.loads(file.metadata()["state"])
        return decode(document, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
