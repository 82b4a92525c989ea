"""Profiles on disk, keyed by all that costs depend on, so that trials and runs with the same key measure once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from hydra_tune.core.measurements import keep, kept
from hydra_tune.graph.costs import as_json, from_json
from hydra_tune.graph.pilot_steps import StateLayout
from hydra_tune.graph.profile import Profile

FORMAT = 9


def profile_key(*facts: Any) -> str:
    """Return the key of a profile: a digest of all facts that costs depend on."""
    return hashlib.sha256(repr((FORMAT, torch.__version__, *facts)).encode()).hexdigest()[:32]


def load_profile(directory: Path, key: str) -> Profile | None:
    """Return the profile stored under `key`; None if there is none or it cannot be read."""
    stored = kept(directory / f"{key}.json")
    if stored is None:
        return None
    try:
        return Profile(
            from_json(stored["nodes"]), state_from_json(stored["state"]), frozenset(stored["mutated"]),
            stored["input_bytes"], {int(value): size for value, size in stored["value_bytes"].items()}, stored["draws"],
            stored["changes_buffers"], frozenset(stored["in_place"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # of another form: it is measured again


def keep_profile(directory: Path, key: str, found: Profile) -> None:
    """Store a profile under `key` for later trials and runs."""
    document = {
        "nodes": as_json(found.nodes), "state": state_to_json(found.state), "mutated": sorted(found.mutated),
        "input_bytes": found.input_bytes, "value_bytes": dict(found.value_bytes), "draws": found.draws,
        "changes_buffers": found.changes_buffers, "in_place": sorted(found.in_place),
    }  # fmt: skip
    keep(directory / f"{key}.json", document)


def state_to_json(state: StateLayout) -> dict[str, Any]:
    """Return the layout of optimizer states as plain data."""
    return {
        name: {k: (str(dtype).removeprefix("torch."), list(shape)) for k, (dtype, shape) in tensors.items()}
        for name, tensors in state.items()
    }


def state_from_json(stored: Any) -> StateLayout:
    """Return the layout of optimizer states from the plain data that `state_to_json` made."""
    return {
        name: {k: (getattr(torch, dtype), tuple(shape)) for k, (dtype, shape) in tensors.items()}
        for name, tensors in stored.items()
    }
