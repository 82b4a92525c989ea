"""Makes a predictor from the trials of a study: out-of-fold predictions, the ensemble, the leaderboard, the files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hydra_tune.automl.ensemble import average, select
from hydra_tune.automl.portfolio import BASELINE
from hydra_tune.automl.predictor import (
    ENSEMBLE,
    MODELS,
    Description,
    Entry,
    loaded,
    outputs_of,
    weights_file,
    write,
)
from hydra_tune.automl.prepared import Prepared
from hydra_tune.automl.scores import Score, score_for
from hydra_tune.coordinator.pruning import EPOCHS
from hydra_tune.coordinator.result import SearchResult
from hydra_tune.search_spaces.table import FOLD
from hydra_tune.storage.queries import TrialRecord

CONSIDERED = 30
"""Number of best trials that predict the held-out rows and may be in the ensemble."""
SAVED = 10
"""Number of best models saved in the directory, besides those in use."""


@dataclass(frozen=True)
class EvaluatedTrial:
    """A trial's model and its predictions for rows it has not seen."""

    entry: Entry
    weights: Path
    predicted: np.ndarray


def finish(
    result: SearchResult,
    prepared: Prepared,
    directory: Path,
    score: Score,
    *,
    notes: tuple[str, ...] = (),
    out_of_time: Callable[[], bool] = lambda: False,
) -> Description:
    """Make the predictor of a study and write it; even without time left it has the best model."""
    truth = prepared.truth()
    judged = _judge(result, prepared, score, truth, out_of_time)
    predictions = {number: each.predicted for number, each in judged.items()}
    weights = select(truth, predictions, score, score_for(prepared.task, _smooth(prepared)))
    entries = [replace(each.entry, weight=round(weights.get(number, 0.0), 6)) for number, each in judged.items()]
    if len(weights) > 1:
        entries.append(_ensemble_entry(entries, score(truth, average(predictions, weights))))
    ranked = sorted(entries, key=lambda entry: (-entry.score if score.greater_is_better else entry.score, entry.model))
    kept = _kept(ranked)
    _copy_weights(directory / MODELS, {number: judged[number].weights for number in kept})
    ranked = [replace(entry, saved=entry.trial is None or entry.trial in kept) for entry in ranked]
    description = Description(metric=score.name, study=result.study.study_name, leaderboard=tuple(ranked), notes=notes)
    write(directory, description)
    return description


def _judge(
    result: SearchResult, prepared: Prepared, score: Score, truth: np.ndarray, out_of_time: Callable[[], bool]
) -> dict[int, EvaluatedTrial]:
    """Evaluate the best trials and the baseline while time allows: the best one first, then the baseline."""
    complete = [record for record in result.trials if record.state == "COMPLETE" and result.has_weights(record.number)]
    ranked = sorted(complete, key=lambda record: (record.value, record.number))
    baseline = [record for record in complete if record.params.get("family") == BASELINE]
    order = [*ranked[:1], *sorted(baseline, key=lambda record: record.value or 0.0)[:1], *ranked[1:CONSIDERED]]
    judged: dict[int, EvaluatedTrial] = {}
    shape, rows = prepared.shape(), prepared.judged_rows()
    fold = rows.tensors[1][:, FOLD].long().numpy()
    for record in order:
        if record.number in judged:
            continue
        if len(judged) >= 2 and out_of_time():
            break
        entry, weights = _entry(result, record), result.weights(record.number)
        began = time.perf_counter()
        said = outputs_of(loaded(entry, shape, weights), rows.tensors[0].numpy(), prepared, entry.params)
        seconds = time.perf_counter() - began
        own = said[np.arange(len(said)), fold]
        predicted = own if prepared.labels else own[:, 0]
        entry = replace(
            entry,
            score=score(truth, predicted),
            predict_seconds=round(1000 * seconds / max(len(said), 1), 6),
            size_bytes=weights.stat().st_size,
        )
        judged[record.number] = EvaluatedTrial(entry, weights, predicted)
    return judged


def _entry(result: SearchResult, record: TrialRecord) -> Entry:
    trial = result.study.get_trials(deepcopy=False)[record.number]
    steps = trial.intermediate_values
    best = min(steps, key=lambda step: (steps[step], step)) + 1 if steps else 1
    return Entry(
        model=f"{record.params['family']}-{record.number}", score=0.0, fit_seconds=round(record.seconds or 0.0, 3),
        predict_seconds=0.0, size_bytes=0, strategy=record.strategy or "", trial=record.number, params=record.params,
        epochs=(best, int(trial.user_attrs.get(EPOCHS, best))),
    )  # fmt: skip


def _ensemble_entry(entries: list[Entry], score: float) -> Entry:
    members = [entry for entry in entries if entry.weight]
    return Entry(
        model=ENSEMBLE, score=score, weight=1.0,
        fit_seconds=round(sum(entry.fit_seconds for entry in members), 3),
        predict_seconds=round(sum(entry.predict_seconds for entry in members), 6),
        size_bytes=sum(entry.size_bytes for entry in members),
        strategy="+".join(sorted({entry.strategy for entry in members})),
    )  # fmt: skip


def _kept(ranked: list[Entry]) -> set[int]:
    """Return the trials whose weights are saved: members, the best ones, and the best baseline."""
    trials = [entry for entry in ranked if entry.trial is not None]
    baseline = [entry for entry in trials if entry.params["family"] == BASELINE]
    wanted = [*trials[:SAVED], *baseline[:1], *(entry for entry in trials if entry.weight)]
    return {entry.trial for entry in wanted if entry.trial is not None}


def _copy_weights(to: Path, files: dict[int, Path]) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for number, source in files.items():
        unfinished = to / f"{source.name}.tmp"
        shutil.copyfile(source, unfinished)
        unfinished.replace(weights_file(to, number))
    for old in to.glob("trial-*.safetensors"):
        if old not in {weights_file(to, number) for number in files}:
            old.unlink()


def _smooth(prepared: Prepared) -> str:
    return "log_loss" if prepared.labels else "rmse"
