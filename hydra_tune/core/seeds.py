"""Seeds: a trial's result depends only on its parameters and its seed."""

from __future__ import annotations

import hashlib
import random
import secrets
import sys

import numpy as np

from hydra_tune.core.after_import import after_import


def new_study_seed() -> int:
    """Return a seed for a study whose user gave none; the study records it, so that it can be repeated."""
    return secrets.randbelow(2**31)


def trial_seed(study_seed: int, number: int) -> int:
    """Return the seed of trial `number`, hashed so that neighbouring trials and studies share no random streams."""
    digest = hashlib.blake2b(f"{study_seed}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def seed_everything(seed: int) -> None:
    """Seed numpy, `random` and torch for user code; torch is seeded on import if it is imported later."""
    global _latest
    first, _latest = _latest is None, seed
    if first:
        after_import("torch", lambda torch: torch.manual_seed(_latest))
    elif "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


_latest: int | None = None
"""The seed to set in torch when it is imported."""
