"""A prepared table: folds, an encoder for each fold, rows as numbers; on disk and as data of the families.

Small tables are cross-validated, large ones hold a fifth back. A fold's encoder and scales are learned only from the
rows that its model is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch.utils.data import TensorDataset

from hydra_tune.automl.encoder import Encoder, layout_for
from hydra_tune.automl.images import ImageEncoder, image_layout, images_in
from hydra_tune.automl.reading import Table, find_target
from hydra_tune.automl.schema import Schema
from hydra_tune.automl.target import FitTask, Label, Target, known_rows, make_target
from hydra_tune.core.errors import InputError, SpecError, quoted
from hydra_tune.search_spaces.dataset import Data, Task, split
from hydra_tune.search_spaces.table import FOLD, JUDGED, NOBODYS, VALUE, TableLayout, TargetScale

ROWS, ENCODERS, DESCRIPTION = "rows.safetensors", "encoders.safetensors", "prepared.json"
FOLDS_BY_ROWS = ((1_000, 8), (10_000, 5))
"""Pairs of maximum rows and number of folds; larger tables hold one part out."""
SKEWED = 1.5
"""From this skewness on, a non-negative target is also offered on a log scale."""


@dataclass(frozen=True)
class Prepared:
    """A table, ready to search on."""

    name: str
    target: str
    task: FitTask
    labels: tuple[Label, ...]
    layout: TableLayout
    scale: TargetScale
    encoders: Sequence[Encoder | ImageEncoder]
    schema: Schema | None
    """None for images."""
    images: str
    """Name of the image array; empty for tables."""
    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def kind(self) -> Task:
        return "regression" if self.task == "regression" else "classification"

    @property
    def outputs(self) -> int:
        return len(self.labels) or 1

    def training_rows(self) -> TensorDataset:
        """Return the rows to train on: all in cross-validation, otherwise those not held out."""
        rows = torch.ones(len(self.targets), dtype=torch.bool)
        if self.layout.folds == 1:
            rows = self.targets[:, FOLD] == NOBODYS
        return TensorDataset(self.inputs[rows], self.targets[rows])

    def judged_rows(self) -> TensorDataset:
        """Return the rows to evaluate on, each by the model that has not seen it."""
        rows = self.targets[:, FOLD] != NOBODYS
        targets = self.targets[rows].clone()
        targets[:, JUDGED] = 1.0
        return TensorDataset(self.inputs[rows], targets)

    def truth(self) -> np.ndarray:
        """Return the targets of the evaluated rows: class numbers, or numbers in the user's units."""
        values = self.judged_rows().tensors[1][:, VALUE].double().numpy()
        return values.astype(int) if self.labels else values * self.scale.scale + self.scale.mean

    @property
    def judged(self) -> bool:
        """True if some rows are held out for evaluation; False for a refit on all rows."""
        return bool((self.targets[:, FOLD] != NOBODYS).any())

    def data(self) -> Data:
        """Return the table as data of the families."""
        train = self.training_rows()
        return self._data(train, self.judged_rows() if self.judged else train)

    def shape(self) -> Data:
        """Return the data without rows: models need only the shape."""
        return self._data((None,), (None,))

    def _data(self, train: Any, valid: Any) -> Data:
        return Data(
            name=self.name, task=self.kind, kind="table", train=train, valid=valid,
            input_shape=(self.layout.folds, self.layout.width), outputs=self.outputs,
            labels=tuple(map(str, self.labels)), layout=self.layout, target_scales=self.scale,
        )  # fmt: skip

    def encode(self, table: Table) -> np.ndarray:
        """Encode the rows of another table, once for each fold, shape (rows, folds, width)."""
        made: list[np.ndarray] = []
        for encoder in self.encoders:
            if isinstance(encoder, ImageEncoder):
                made.append(encoder.encode(self._images(table)))
            else:
                assert table.frame is not None
                made.append(encoder.encode(table.frame, self.layout))
        return np.stack(made, axis=1)

    def _images(self, table: Table) -> np.ndarray:
        _, images = images_in(table, self.target, self.images)
        if images.shape[1:] != self.layout.image:
            raise SpecError(
                f"the images of {table.name} have the shape {images.shape[1:]}", f"the model takes {self.layout.image}"
            )
        return images

    def save(self, directory: Path) -> None:
        rows = {"inputs": self.inputs.numpy(), "targets": self.targets.numpy()}
        arrays = {f"{i}.{n}": a for i, encoder in enumerate(self.encoders) for n, a in encoder.arrays().items()}
        save_file({name: np.ascontiguousarray(array) for name, array in rows.items()}, directory / ROWS)
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, directory / ENCODERS)
        (directory / DESCRIPTION).write_text(json.dumps(self._description(), indent=1) + "\n", encoding="utf-8")

    def _description(self) -> dict[str, Any]:
        scale = {name: getattr(self.scale, name) for name in TargetScale.__dataclass_fields__}
        return {
            "name": self.name, "target": self.target, "task": self.task, "labels": list(self.labels),
            "layout": self.layout.as_json(), "scale": scale, "images": self.images,
            "schema": None if self.schema is None else self.schema.as_json(),
            "encoders": [encoder.names() for encoder in self.encoders],
        }  # fmt: skip

    @classmethod
    def load(cls, directory: Path, *, rows: bool = True) -> Prepared:
        """Load what `save` wrote; without `rows`, only what encoding new rows needs."""
        try:
            plain = json.loads((directory / DESCRIPTION).read_text(encoding="utf-8"))
            arrays = load_file(directory / ENCODERS)
            none = {"inputs": np.zeros((0, 1, 1), np.float32), "targets": np.zeros((0, 4), np.float32)}
            return cls._from(plain, arrays, load_file(directory / ROWS) if rows else none)
        except FileNotFoundError as error:
            raise InputError(f"{directory} holds no fit ({error.filename} is missing)", "give --to of a fit") from None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InputError(f"{directory} is damaged ({quoted(error)})", "fit again") from error

    @classmethod
    def _from(cls, plain: dict[str, Any], arrays: dict[str, np.ndarray], rows: dict[str, np.ndarray]) -> Prepared:
        schema = None if plain["schema"] is None else Schema.from_json(plain["schema"])
        own = [
            {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{i}.")}
            for i in range(len(plain["encoders"]))
        ]
        encoders: Any = (
            tuple(ImageEncoder.restore(each) for each in own)
            if schema is None
            else tuple(Encoder.restore(schema, names, each) for names, each in zip(plain["encoders"], own, strict=True))
        )
        scale: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain["scale"].items()
        }
        return cls(
            name=plain["name"], target=plain["target"], task=plain["task"], labels=tuple(plain["labels"]),
            layout=TableLayout.from_json(plain["layout"]), scale=TargetScale(**scale), encoders=encoders, schema=schema,
            images=plain["images"], inputs=torch.from_numpy(rows["inputs"]), targets=torch.from_numpy(rows["targets"]),
        )  # fmt: skip


def prepare(
    table: Table,
    target: str,
    *,
    task: str | None = None,
    folds: int | None = None,
    held_out: bool = True,
    seed: int = 0,
) -> tuple[Prepared, list[str]]:
    """Prepare a table with its target; return it with notes. Without `held_out` all rows are trained on."""
    find_target(table, target)
    values = table.frame[target] if table.frame is not None else _column(table, target)
    known, notes = known_rows(values, table.name)
    goal = make_target(values[known].reset_index(drop=True), table.name, task)
    if len(goal.values) < 3:
        raise SpecError(f"{table.name} has {len(goal.values)} rows with a target", "give at least 3")
    fold = np.full(len(goal.values), NOBODYS)
    if held_out:
        fold = assign_folds(goal, _folds(len(goal.values), folds, tabular=table.frame is not None), seed)
    parts = [fold != i for i in range(max(1, int(fold.max()) + 1))]
    scale = target_scale(goal, parts)
    rows, more = (_columns if table.frame is not None else _pictures)(table, target, known, parts)
    prepared = Prepared(
        name=table.name, target=target, task=goal.task, labels=goal.labels, scale=scale,
        targets=_targets(goal, scale, fold), **rows,
    )  # fmt: skip
    return prepared, [*table.notes, *notes, *more]


def _columns(table: Table, target: str, known: np.ndarray, parts: list[np.ndarray]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a `Prepared` from the columns of a frame, with an encoder for each part of the rows."""
    assert table.frame is not None
    frame = table.frame.loc[known].drop(columns=target).reset_index(drop=True)
    schema, notes = Schema.of(frame, table.name)
    encoders = tuple(Encoder.learn(schema, frame[part]) for part in parts)
    layout = layout_for(list(encoders), len(frame))
    inputs = torch.from_numpy(np.stack([encoder.encode(frame, layout) for encoder in encoders], axis=1))
    return {"schema": schema, "images": "", "encoders": encoders, "layout": layout, "inputs": inputs}, notes


def _pictures(
    table: Table, target: str, known: np.ndarray, parts: list[np.ndarray]
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a `Prepared` from an array of images."""
    name, images = images_in(table, target)
    if len(images) != len(known):
        raise SpecError(f"{table.name} has {len(images)} images and {len(known)} targets", "give one for each")
    images = images[known]
    encoders = tuple(ImageEncoder.learn(images[part]) for part in parts)
    layout = image_layout(images.shape[1:], len(parts), len(images))
    inputs = torch.from_numpy(np.stack([encoder.encode(images) for encoder in encoders], axis=1))
    return {"schema": None, "images": name, "encoders": encoders, "layout": layout, "inputs": inputs}, []


def assign_folds(goal: Target, folds: int, seed: int) -> np.ndarray:
    """Return the fold of each row, stratified by class or range of numbers; one fold means one part held out."""
    rows = len(goal.values)
    if folds == 1:
        _, held_out = split(rows, goal.values if goal.labels else None)
        fold = np.full(rows, NOBODYS)
        fold[held_out] = 0
        return fold
    shuffled = np.random.default_rng(seed).permutation(rows)
    ordered = shuffled[np.argsort(goal.values[shuffled], kind="stable")]
    fold = np.empty(rows, dtype=int)
    # Dealt in the order of the target: each fold gets its share of every class and range.
    fold[ordered] = np.arange(rows) % folds
    return fold


def target_scale(goal: Target, parts: list[np.ndarray]) -> TargetScale:
    """Return the scaling of the target for each fold's model, from the rows it is trained on."""
    if goal.labels:
        return TargetScale()
    mean, scale = float(goal.values.mean()), float(goal.values.std()) or 1.0
    unit = _log_unit(goal.values)
    stored = (goal.values - mean) / scale
    logs = np.zeros_like(stored) if unit is None else np.log1p(goal.values / unit)
    return TargetScale(
        mean=mean, scale=scale, unit=unit,
        centres=tuple(float(stored[part].mean()) for part in parts),
        spreads=tuple(float(stored[part].std()) or 1.0 for part in parts),
        log_centres=tuple(float(logs[part].mean()) for part in parts),
        log_spreads=tuple(float(logs[part].std()) or 1.0 for part in parts),
    )  # fmt: skip


def _log_unit(values: np.ndarray) -> float | None:
    from scipy.stats import skew

    if values.min() < 0 or skew(values) < SKEWED:
        return None
    return float(np.median(values[values > 0]))


def _targets(goal: Target, scale: TargetScale, fold: np.ndarray) -> torch.Tensor:
    values = goal.values if goal.labels else (goal.values - scale.mean) / scale.scale
    logs = np.zeros(len(values)) if scale.unit is None else np.log1p(goal.values / scale.unit)
    return torch.from_numpy(np.stack([values, logs, fold, np.zeros(len(values))], axis=1).astype(np.float32))


def _folds(rows: int, asked: int | None, tabular: bool) -> int:
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= rows:
            raise SpecError(f"folds cannot be {quoted(asked)}", f"give 1 (a part held out) to {min(rows, 20)}")
        return asked
    if not tabular:
        return 1
    return next((min(folds, rows) for most, folds in FOLDS_BY_ROWS if rows < most), 1)


def _column(table: Table, target: str) -> Any:
    import pandas as pd

    assert table.arrays is not None
    values = table.arrays[target]
    if values.ndim != 1:
        raise SpecError(f"the array {target!r} of {table.name} has the shape {values.shape}", "give one target a row")
    return pd.Series(values, name=target)
