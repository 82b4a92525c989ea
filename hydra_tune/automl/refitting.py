"""Trains the chosen models again on all rows, held-out ones included, each to its best epoch.

Runs as a study of its own. If it does not complete, the models of the folds stay in use.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from hydra_tune.automl.build import FitPlan, FitSource
from hydra_tune.automl.predictor import MODELS, REFIT, Predictor, weights_file, write
from hydra_tune.automl.prepared import Prepared, prepare
from hydra_tune.automl.reading import TableLike, read_table
from hydra_tune.automl.state import make_directory
from hydra_tune.coordinator.search import run_search
from hydra_tune.coordinator.settings import SearchSettings, made_up_name
from hydra_tune.core.errors import InputError


def refit_members(
    directory: Path, table: TableLike | None, fitted: Prepared, plan: FitPlan, search: SearchSettings
) -> None:
    """Replace the predicting models in a fit's directory by models trained on all rows of `table`."""
    if table is None:
        raise InputError(f"the rows of {fitted.name} are needed for a refit", "fit again with the table and --resume")
    description = Predictor(directory).description
    members = [entry for entry in description.leaderboard if entry.weight and entry.trial is not None]
    place = directory / REFIT
    make_directory(place)
    prepared, _ = prepare(read_table(table), fitted.target, task=fitted.task, held_out=False)
    prepared.save(place)
    source = FitSource(str(place.resolve()), replace(plan, epochs=tuple(entry.epochs for entry in members)))
    build = source.load()
    settings = replace(
        search, study=f"refit-{made_up_name()}", metric="loss", trials=len(members), sampler="random", pruner=None,
        enqueue=[dict(entry.params) for entry in members], resume=False,
        stop_at_timeout=search.timeout is not None,
    )  # fmt: skip
    result = run_search(source, settings, space=build.space, load_build=lambda: build)
    try:
        if result.completed < len(members):
            raise InputError("not all models could be trained again in the time", "give more --time, or no --refit")
        make_directory(place / MODELS)
        for number, entry in enumerate(members):
            assert entry.trial is not None
            shutil.copyfile(result.weights(number), weights_file(place / MODELS, entry.trial))
    finally:
        result.close()
    write(directory, replace(description, refit=True))
