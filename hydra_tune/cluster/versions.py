"""Versions that must be the same on all nodes: results, and the pickles that travel, depend on them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

from hydra_tune.core.version import VERSION

COMPARED = ("python", "torch", "hydra-tune")


def versions() -> dict[str, str]:
    """Return this interpreter's versions; of Python the first two numbers, as patches do not matter."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch, "hydra-tune": VERSION}


def difference(theirs: Mapping[str, object], ours: Mapping[str, str]) -> str:
    """Return how a node's versions differ from the coordinator's; empty if they do not."""
    return ", ".join(
        f"{name} {theirs.get(name, 'unknown')} instead of {ours[name]}"
        for name in COMPARED
        if theirs.get(name) != ours[name]
    )
