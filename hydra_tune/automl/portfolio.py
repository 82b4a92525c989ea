"""The first trials of a fit: the baseline, then settings of each family that do well on most tables.

A small, diverse portfolio finds a good model before the sampler has learned anything, and gives it data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra_tune.automl.prepared import Prepared
from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.search_spaces.distributions import contains
from hydra_tune.search_spaces.families import FAMILIES
from hydra_tune.search_spaces.space import Space

BASELINE = "linear"
MOST_TOKENS = 48
"""Maximum number of columns for attention, which takes too long on a CPU with more."""

_STARTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (BASELINE, {"lr": 0.02, "weight_decay": 1e-3, "scaling": "quantile"}),
    ("resnet", {"channels": 16, "stages": 2, "optimizer": "adamw", "lr": 0.003}),
    ("tabular_mlp", {"depth": 2, "width": 128, "members": 4, "lr": 0.003, "weight_decay": 0.03, "dropout": 0.15,
                     "periodic": 0, "scaling": "quantile", "activation": "relu", "smoothing": 0.0}),
    ("tabular_mlp", {"depth": 2, "width": 64, "members": 4, "lr": 0.005, "weight_decay": 0.05, "dropout": 0.1,
                     "periodic": 8, "sigma": 0.1, "scaling": "quantile", "activation": "silu", "smoothing": 0.0}),
    (BASELINE, {"lr": 0.02, "weight_decay": 0.03, "scaling": "robust"}),
    ("tabular_resnet", {"blocks": 2, "width": 64, "expansion": 2.0, "members": 4, "lr": 0.002, "weight_decay": 0.05,
                        "dropout": 0.2, "periodic": 0, "scaling": "robust", "smoothing": 0.0}),
    ("ft_transformer", {"blocks": 2, "head_width": 8, "lr": 0.001, "weight_decay": 1e-3, "dropout": 0.1,
                        "scaling": "quantile", "smoothing": 0.0}),
    ("resnet", {"channels": 32, "stages": 2, "optimizer": "adamw", "lr": 0.002}),
    ("tabular_mlp", {"depth": 1, "width": 256, "members": 4, "lr": 0.003, "weight_decay": 0.2, "dropout": 0.3,
                     "periodic": 0, "scaling": "robust", "activation": "gelu", "smoothing": 0.1}),
    ("tabular_mlp", {"depth": 3, "width": 128, "members": 4, "lr": 0.002, "weight_decay": 0.03, "dropout": 0.2,
                     "periodic": 8, "sigma": 0.3, "scaling": "quantile", "activation": "relu", "smoothing": 0.0}),
    ("tabular_mlp", {"depth": 2, "width": 128, "members": 4, "lr": 0.003, "weight_decay": 0.03, "dropout": 0.15,
                     "periodic": 0, "scaling": "quantile", "activation": "relu", "target": "log"}),
)  # fmt: skip


def families_for(prepared: Prepared, asked: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the families to search, always including the baseline."""
    if prepared.layout.image is not None:
        suitable = [BASELINE, "resnet", "tabular_mlp"]
    else:
        suitable = [BASELINE, "tabular_mlp", "tabular_resnet", "ft_transformer"]
    if asked is None:
        too_wide = prepared.layout.tokens > MOST_TOKENS
        return tuple(name for name in suitable if not (too_wide and name == "ft_transformer"))
    for name in asked:
        if name not in suitable:
            what = "there is no model family" if name not in FAMILIES else "this table has no use for the family"
            raise SpecError(f"{what} {quoted(name)}", nearest(str(name), suitable))
    return tuple(dict.fromkeys((BASELINE, *asked)))


def first_trials(families: Sequence[str], space: Space) -> list[dict[str, Any]]:
    """Return the portfolio of these families, restricted to parameters and values of the space."""
    distributions = {param.name: param.distribution for param in space.params}
    trials = []
    for name, start in _STARTS:
        skewed = f"{name}.target" in distributions
        if name not in families or ("target" in start and not skewed):
            continue
        wanted = {f"{name}.{key}": value for key, value in ({"target": "plain", **start} if skewed else start).items()}
        fitting = {
            key: value for key, value in wanted.items() if key in distributions and contains(distributions[key], value)
        }
        trials.append({"family": name, **fitting})
    return trials
