"""Shared parts of the families for tables: parameters of their first layer and of their training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution

from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces.bagged import TableFeatures
from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.space import Above, Param
from hydra_tune.search_spaces.table import TableLayout
from hydra_tune.search_spaces.training import HUGE

MOST_EMBEDDED_NUMBERS = 100
"""Most numeric columns that are embedded; with more, the first layer becomes larger than it is worth."""


def layout_of(data: Data) -> TableLayout:
    """Return the layout of a table's rows."""
    if data.layout is None:
        raise SpecError(f"data {data.name!r} is no table", "use a family for its kind")
    return data.layout


def feature_params(data: Data) -> list[Param]:
    """Return the parameters of the layer that turns a row into a vector."""
    layout = layout_of(data)
    params = [scaling_param(layout)]
    embeds = layout.numbers and layout.numbers <= MOST_EMBEDDED_NUMBERS and layout.image is None
    periodic = (0, 8) if embeds else (0,)
    params.append(Param("periodic", CategoricalDistribution(periodic)))
    params.append(Param("sigma", FloatDistribution(0.03, 1.0, log=True), when=Above("periodic", 0), limits=(1e-4, 10)))
    if layout.categories:
        params.append(Param("category_width", CategoricalDistribution((4, 8, 16)), limits=(1, 1024)))
    if layout.texts:
        params.append(Param("text_width", CategoricalDistribution((16, 32, 64)), limits=(1, 1024)))
    return params


def scaling_param(layout: TableLayout) -> Param:
    """Return the scaling parameter: robust (by median and quartiles, softly clipped) or by normal quantiles."""
    return Param("scaling", CategoricalDistribution(("robust", "quantile") if layout.image is None else ("robust",)))


def members_param(data: Data) -> Param:
    """Return the parameter for a fold's ensemble size; fewer with many folds, which form an ensemble already."""
    choices = (1, 4, 8) if layout_of(data).folds == 1 else (1, 2, 4)
    return Param("members", CategoricalDistribution(choices), limits=(1, 256))


def features(params: Mapping[str, Any], layout: TableLayout) -> TableFeatures:
    """Return the first layer for an assignment of `feature_params`."""
    return TableFeatures(
        layout,
        quantiles=params["scaling"] == "quantile",
        periodic=params["periodic"],
        sigma=params.get("sigma", 0.1),
        category_width=params.get("category_width", 1),
        text_width=params.get("text_width", 1),
    )


def table_training_params(
    data: Data, *, lr: tuple[float, float], decay: tuple[float, float] = (1e-5, 1.0)
) -> list[Param]:
    """Return the training parameters for models of tables, with a choice of target scale if it is skewed."""
    rows = layout_of(data).rows
    sizes = (32, 64) if rows < 1000 else (64, 128, 256) if rows < 20_000 else (256, 512)
    params = [
        Param("lr", FloatDistribution(*lr, log=True), limits=(1e-8, 10.0)),
        Param("weight_decay", FloatDistribution(*decay, log=True), limits=(0.0, 10.0)),
        Param("batch_size", CategoricalDistribution(sizes), limits=(1, HUGE)),
    ]
    if data.task == "classification":
        params.append(Param("smoothing", CategoricalDistribution((0.0, 0.1)), limits=(0.0, 0.9)))
    elif data.target_scales is not None and data.target_scales.unit is not None:
        params.append(Param("target", CategoricalDistribution(("plain", "log"))))
    return params
