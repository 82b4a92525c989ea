"""Hydra Tune: hyperparameter search over many models at once on a small pool of devices.

The names below load on first use, so that `import hydra_tune` (and `hydra-tune --help`) does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra_tune.automl.fit import fit as fit
    from hydra_tune.automl.predictor import Predictor as Predictor
    from hydra_tune.batches import epoch_order as epoch_order
    from hydra_tune.candidate import Candidate as Candidate
    from hydra_tune.candidate import Pinned as Pinned
    from hydra_tune.coordinator import search as search
    from hydra_tune.errors import CandidateError as CandidateError
    from hydra_tune.errors import HydraTuneError as HydraTuneError
    from hydra_tune.errors import InputError as InputError
    from hydra_tune.errors import SearchFailed as SearchFailed
    from hydra_tune.errors import SpecError as SpecError
    from hydra_tune.errors import StorageError as StorageError
    from hydra_tune.result import SearchResult as SearchResult
    from hydra_tune.seeds import trial_seed as trial_seed

__version__ = "0.1.0"

_HOME = {
    "Candidate": "hydra_tune.candidate",
    "CandidateError": "hydra_tune.errors",
    "HydraTuneError": "hydra_tune.errors",
    "InputError": "hydra_tune.errors",
    "Pinned": "hydra_tune.candidate",
    "Predictor": "hydra_tune.automl.predictor",
    "SearchFailed": "hydra_tune.errors",
    "SearchResult": "hydra_tune.result",
    "SpecError": "hydra_tune.errors",
    "StorageError": "hydra_tune.errors",
    "epoch_order": "hydra_tune.batches",
    "fit": "hydra_tune.automl.fit",
    "search": "hydra_tune.coordinator",
    "trial_seed": "hydra_tune.seeds",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hydra_tune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
