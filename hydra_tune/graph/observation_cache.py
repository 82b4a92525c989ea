"""Observations on disk, keyed by all that costs depend on, so that trials and runs with the same key measure once."""

from __future__ import annotations

from pathlib import Path

import torch

from hydra_tune.core.measurements import keep, kept
from hydra_tune.graph.costs import as_json, from_json
from hydra_tune.graph.observe import Observation, Observed, ObservedNode
from hydra_tune.graph.profile_cache import state_from_json, state_to_json


def load_observation(directory: Path, key: str) -> Observation | None:
    """Return the observation stored under `key`; None if there is none or it cannot be read."""
    stored = kept(directory / f"{key}.json")
    if stored is None:
        return None
    try:
        nodes = tuple(ObservedNode(name, tuple(used), tuple(calls)) for name, used, calls in stored["observed"])
        retyped = tuple((name, getattr(torch, dtype)) for name, dtype in stored["retyped"])
        return Observation(
            Observed(nodes, stored["mixed"], tuple(stored["rewritten"]), stored["late"], retyped),
            from_json(stored["nodes"]), state_from_json(stored["state"]),
            stored["input_bytes"], stored["changes_buffers"], stored["draws"],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # of another form: it is measured again


def keep_observation(directory: Path, key: str, found: Observation) -> None:
    """Store an observation under `key` for later trials and runs."""
    document = {
        "observed": [[node.name, node.parameters, node.calls] for node in found.observed.nodes],
        "rewritten": found.observed.rewritten, "late": found.observed.late, "mixed": found.observed.mixed,
        "retyped": [[name, str(dtype).removeprefix("torch.")] for name, dtype in found.observed.retyped],
        "nodes": as_json(found.nodes), "state": state_to_json(found.state),
        "input_bytes": found.input_bytes, "changes_buffers": found.changes_buffers, "draws": found.draws,
    }  # fmt: skip
    keep(directory / f"{key}.json", document)
