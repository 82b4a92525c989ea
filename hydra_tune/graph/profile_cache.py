"""Profiles on disk, by all that costs depend on, so that trials and runs that share it measure once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from hydra_tune.graph.costs import as_json, from_json
from hydra_tune.graph.profile import Profile
from hydra_tune.measurements import keep, kept

FORMAT = 9


def profile_key(*facts: Any) -> str:
    """One name for all that costs depend on."""
    return hashlib.sha256(repr((FORMAT, torch.__version__, *facts)).encode()).hexdigest()[:32]


def load_profile(directory: Path, key: str) -> Profile | None:
    """The profile of that key, where one is kept and can be read."""
    stored = kept(directory / f"{key}.json")
    if stored is None:
        return None
    try:
        state = {
            name: {k: (getattr(torch, dtype), tuple(shape)) for k, (dtype, shape) in tensors.items()}
            for name, tensors in stored["state"].items()
        }
        return Profile(
            from_json(stored["nodes"]), state, frozenset(stored["mutated"]), stored["input_bytes"],
            {int(value): size for value, size in stored["value_bytes"].items()}, stored["draws"],
            stored["changes_buffers"], frozenset(stored["in_place"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # of another form: it is measured again


def keep_profile(directory: Path, key: str, found: Profile) -> None:
    """Keep a profile for later trials and runs."""
    state = {
        name: {k: (str(dtype).removeprefix("torch."), list(shape)) for k, (dtype, shape) in tensors.items()}
        for name, tensors in found.state.items()
    }
    document = {
        "nodes": as_json(found.nodes), "state": state, "mutated": sorted(found.mutated),
        "input_bytes": found.input_bytes, "value_bytes": dict(found.value_bytes), "draws": found.draws,
        "changes_buffers": found.changes_buffers, "in_place": sorted(found.in_place),
    }  # fmt: skip
    keep(directory / f"{key}.json", document)
