"""A fitted model that predicts, is evaluated and explains itself; stored as a directory of JSON and safetensors.

Members are models of the study, each for all folds of the table; a prediction is the mean over folds, then the weighted
mean over members.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hydra_tune.automl.build import make_model, params_of
from hydra_tune.automl.importance import Importance, permuted_importance
from hydra_tune.automl.prepared import Prepared
from hydra_tune.automl.reading import Table, TableLike, find_target, read_table
from hydra_tune.automl.scores import SCORES, Score, score_for
from hydra_tune.automl.target import FitTask, codes_of, known_rows, labels_of
from hydra_tune.core.errors import InputError, SpecError, nearest, quoted
from hydra_tune.core.weights import load_weights
from hydra_tune.search_spaces.bagged_objectives import answers
from hydra_tune.search_spaces.table import FOLD

if TYPE_CHECKING:
    import pandas as pd

PREDICTOR, MODELS, REFIT = "predictor.json", "models", "refit"
ENSEMBLE = "ensemble"
BATCH = 4096
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the leaderboard."""

    model: str
    score: float
    fit_seconds: float
    predict_seconds: float
    """Seconds for 1,000 rows."""
    size_bytes: int
    strategy: str
    weight: float = 0.0
    """Weight in the ensemble, or 1 for the model that predicts alone."""
    trial: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    epochs: tuple[int, int] = (0, 0)
    """The best epoch, and the planned number of epochs."""
    saved: bool = True
    """True if its weights are in the directory."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A predictor without its weights and encoders."""

    metric: str
    study: str
    leaderboard: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    refit: bool = False


class Predictor:
    """A fitted model, read from the directory of its fit."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.description = _read(self.directory)
        place = self.directory / REFIT if self.description.refit else self.directory
        self._prepared = Prepared.load(place, rows=False)
        self._weights = place / MODELS
        self._models: dict[int, nn.Module] = {}

    def __repr__(self) -> str:
        members = sum(entry.weight > 0 for entry in self.description.leaderboard if entry.trial is not None)
        return f"Predictor({str(self.directory)!r}, task={self.task!r}, metric={self.metric!r}, members={members})"

    @property
    def task(self) -> FitTask:
        return self._prepared.task

    @property
    def target(self) -> str:
        return self._prepared.target

    @property
    def metric(self) -> str:
        return self.description.metric

    @property
    def study(self) -> str:
        """Name of the study that was searched."""
        return self.description.study

    @property
    def classes(self) -> tuple[Any, ...]:
        return self._prepared.labels

    @property
    def score(self) -> float:
        """Score of the predicting model or ensemble on held-out rows."""
        return next(entry.score for entry in self.description.leaderboard if entry.weight == 1)

    def leaderboard(self) -> pd.DataFrame:
        """Return the models, best first, with their validation score, times, size and strategy."""
        import pandas as pd

        columns = ("model", "score", "fit_seconds", "predict_seconds", "size_bytes", "strategy", "weight", "trial")
        rows = [[getattr(entry, name) for name in columns] for entry in self.description.leaderboard]
        return pd.DataFrame(rows, columns=list(columns))

    def predict(self, table: TableLike, *, model: str | None = None) -> pd.Series[Any]:
        """Return the class or number for each row; `model` is a name of the leaderboard."""
        import pandas as pd

        rows = self._read(table)
        predicted = self._predicted(self._prepared.encode(rows), model)
        values = labels_of(self.classes, predicted.argmax(axis=1)) if self.classes else predicted
        return pd.Series(values, name=self.target, index=_index(table))

    def predict_proba(self, table: TableLike, *, model: str | None = None) -> pd.DataFrame:
        """Return the probability of each class for each row."""
        import pandas as pd

        if not self.classes:
            raise InputError("a regression has no probabilities", "use predict")
        predicted = self._predicted(self._prepared.encode(self._read(table)), model)
        return pd.DataFrame(predicted, columns=list(self.classes), index=_index(table))

    def evaluate(self, table: TableLike, *, model: str | None = None) -> dict[str, float]:
        """Return every metric of the task on a table that has the target."""
        rows, truth = self._with_truth(table)
        predicted = self._predicted(rows, model)
        return {score.name: score(truth, predicted) for score in self._possible_scores(truth)}

    def feature_importance(
        self, table: TableLike | None = None, *, repeats: int = 5, seed: int = 0
    ) -> list[Importance]:
        """Return how much worse the score gets if a column is shuffled among rows, the most important column first.

        Without a table, on the held-out rows, each predicted by the model that has not seen it.
        """
        prepared = self._prepared
        if prepared.schema is None:
            raise InputError("images have no columns", "give a table")
        if table is None:
            fitted = Prepared.load(self.directory)
            held_out = fitted.judged_rows()
            fold = held_out.tensors[1][:, FOLD].long().numpy()
            rows, truth = held_out.tensors[0].numpy(), fitted.truth()
            members = self._of_folds()
            return permuted_importance(
                fitted, rows, truth, lambda inputs: members._predicted(inputs, None, fold), self._score, repeats, seed
            )
        rows, truth = self._with_truth(table)
        return permuted_importance(
            prepared, rows, truth, lambda inputs: self._predicted(inputs, None), self._score, repeats, seed
        )

    def _of_folds(self) -> Predictor:
        """Return this predictor as it was evaluated, before a refit on all rows."""
        if not self.description.refit:
            return self
        before = Predictor.__new__(Predictor)
        before.directory, before.description = self.directory, self.description
        before._prepared = Prepared.load(self.directory, rows=False)
        before._weights, before._models = self.directory / MODELS, {}
        return before

    @property
    def _score(self) -> Score:
        return score_for(self.task, self.metric)

    def _possible_scores(self, truth: np.ndarray) -> Sequence[Score]:
        both = len(np.unique(truth)) > 1
        return [score for score in SCORES[self.task] if both or score.name != "roc_auc"]

    def _read(self, table: TableLike) -> Table:
        rows = read_table(table)
        if self._prepared.schema is not None:
            if rows.frame is None:
                raise SpecError(f"{rows.name} holds arrays", "give a table with the columns that were fitted")
            extra = self._prepared.schema.check(rows.columns, rows.name, self.target)
            if extra:
                names = ", ".join(map(repr, extra[:5])) + (" …" if len(extra) > 5 else "")
                warnings.warn(f"columns that the model does not know are not used: {names}", stacklevel=3)
        elif rows.arrays is None:
            raise SpecError(f"{rows.name} is no .npz file", f"give images as an array {self._prepared.images!r}")
        return rows

    def _with_truth(self, table: TableLike) -> tuple[np.ndarray, np.ndarray]:
        import pandas as pd

        rows = self._read(table)
        find_target(rows, self.target)
        column = rows.frame[self.target] if rows.frame is not None else pd.Series(rows.arrays[self.target])  # type: ignore[index]
        column.name = self.target
        known, _ = known_rows(column, rows.name)
        encoded = self._prepared.encode(rows)[known]
        if self.classes:
            return encoded, codes_of(self.classes, column[known], rows.name)
        numbers = pd.to_numeric(column[known], errors="coerce").to_numpy(dtype=float)
        if np.isnan(numbers).any():
            raise SpecError(f"column {self.target!r} of {rows.name} holds what is no number", "mend such cells")
        return encoded, numbers

    def _predicted(self, inputs: np.ndarray, model: str | None, fold: np.ndarray | None = None) -> np.ndarray:
        """Return probabilities (rows, classes) or numbers (rows,); with `fold`, each row by that fold's models."""
        total: Any = 0.0
        for entry, weight in self._chosen(model):
            said = outputs_of(self._model(entry), inputs, self._prepared, entry.params)
            own = said.mean(axis=1) if fold is None else said[np.arange(len(said)), fold]
            total = total + weight * own
        return np.asarray(total if self.classes else total[:, 0])

    def _chosen(self, model: str | None) -> list[tuple[Entry, float]]:
        entries = {entry.model: entry for entry in self.description.leaderboard}
        if model is None or (model == ENSEMBLE and ENSEMBLE in entries):
            return [(entry, entry.weight) for entry in entries.values() if entry.weight and entry.trial is not None]
        if model not in entries:
            raise SpecError(f"there is no model {quoted(model)}", nearest(str(model), entries))
        if not entries[model].saved or self.description.refit:
            raise SpecError(f"the weights of {model!r} were not kept", "only those of the best models are")
        return [(entries[model], 1.0)]

    def _model(self, entry: Entry) -> nn.Module:
        assert entry.trial is not None
        if entry.trial not in self._models:
            self._models[entry.trial] = loaded(entry, self._shape, weights_file(self._weights, entry.trial))
        return self._models[entry.trial]

    @cached_property
    def _shape(self) -> Any:
        return self._prepared.shape()


def loaded(entry: Entry, shape: Any, path: Path) -> nn.Module:
    """Return a member's model with its weights."""
    kind, params = params_of(entry.params)
    model = make_model(kind, params, shape)
    load_weights(model, path)
    return model.eval()


def weights_file(directory: Path, trial: int) -> Path:
    return directory / f"trial-{trial}.safetensors"


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: np.ndarray, prepared: Prepared, params: Mapping[str, Any]) -> np.ndarray:
    """Return each fold's probabilities, or numbers in the user's units, shape (rows, folds, outputs)."""
    log = params_of(params)[1].get("target") == "log"
    parts = [
        answers(model(torch.from_numpy(inputs[start : start + BATCH])), prepared.kind, prepared.scale, log)
        .double()
        .numpy()
        for start in range(0, len(inputs), BATCH)
    ]
    return np.concatenate(parts) if parts else np.zeros((0, prepared.layout.folds, prepared.outputs))


def write(directory: Path, description: Description) -> None:
    """Write a predictor's description atomically: its presence makes a directory a predictor."""
    plain = {"version": VERSION, **asdict(description)}
    unfinished = directory / f"{PREDICTOR}.tmp"
    unfinished.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, directory / PREDICTOR)


def _read(directory: Path) -> Description:
    try:
        plain = json.loads((directory / PREDICTOR).read_text(encoding="utf-8"))
        version = plain.pop("version")
        if version != VERSION:
            raise InputError(f"{directory} is of version {version}, this is {VERSION}", "use the program that wrote it")
        entries = [Entry(**{**entry, "epochs": tuple(entry["epochs"])}) for entry in plain.pop("leaderboard")]
        return Description(**{**plain, "leaderboard": tuple(entries), "notes": tuple(plain["notes"])})
    except (FileNotFoundError, NotADirectoryError):
        hint = "give the --to of a fit that has finished or was interrupted"
        raise InputError(f"{str(directory)!r} holds no predictor", hint) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{directory / PREDICTOR} is damaged ({quoted(error)})", "fit again") from error


def _index(table: TableLike) -> Any:
    import pandas as pd

    return table.index if isinstance(table, pd.DataFrame) else None
