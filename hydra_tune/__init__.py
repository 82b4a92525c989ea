"""Hydra Tune: hyperparameter search over many models at once on a small pool of devices.

The names below load on first use, so that `import hydra_tune` (and `hydra-tune --help`) does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hydra_tune.core.version import VERSION

if TYPE_CHECKING:
    from hydra_tune.automl.fit import fit as fit
    from hydra_tune.automl.predictor import Predictor as Predictor
    from hydra_tune.coordinator.result import SearchResult as SearchResult
    from hydra_tune.coordinator.search import search as search
    from hydra_tune.core.errors import CandidateError as CandidateError
    from hydra_tune.core.errors import HydraTuneError as HydraTuneError
    from hydra_tune.core.errors import InputError as InputError
    from hydra_tune.core.errors import SearchFailed as SearchFailed
    from hydra_tune.core.errors import SpecError as SpecError
    from hydra_tune.core.errors import StorageError as StorageError
    from hydra_tune.core.seeds import trial_seed as trial_seed
    from hydra_tune.training.batches import epoch_order as epoch_order
    from hydra_tune.training.candidate import Candidate as Candidate
    from hydra_tune.training.candidate import Pinned as Pinned
    from hydra_tune.training.remote_trial import extended as extended

__version__ = VERSION

_HOME = {
    "Candidate": "hydra_tune.training.candidate",
    "CandidateError": "hydra_tune.core.errors",
    "HydraTuneError": "hydra_tune.core.errors",
    "InputError": "hydra_tune.core.errors",
    "Pinned": "hydra_tune.training.candidate",
    "Predictor": "hydra_tune.automl.predictor",
    "SearchFailed": "hydra_tune.core.errors",
    "SearchResult": "hydra_tune.coordinator.result",
    "SpecError": "hydra_tune.core.errors",
    "StorageError": "hydra_tune.core.errors",
    "epoch_order": "hydra_tune.training.batches",
    "extended": "hydra_tune.training.remote_trial",
    "fit": "hydra_tune.automl.fit",
    "search": "hydra_tune.coordinator.search",
    "trial_seed": "hydra_tune.core.seeds",
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
