"""Exports a trained model: weights as safetensors, its record as JSON, its program by torch.export.

Of an objective it exports what the objective kept with `trial.keep`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_tune.coordinator.result import SearchResult
from hydra_tune.coordinator.trust import check_trusted
from hydra_tune.core.errors import InputError, SpecError
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import study_summary
from hydra_tune.training.kept_files import keep_file
from hydra_tune.training.source import source_from

if TYPE_CHECKING:
    from torch import nn

    from hydra_tune.training.candidate import Candidate

WEIGHTS, RECORD, PROGRAM = "model.safetensors", "trial.json", "program.pt2"


@dataclass
class Exported:
    """Files that an export wrote."""

    trial: int
    files: list[Path] = field(default_factory=list)
    no_program_because: str = ""


def export_trial(
    storage: str, study: str, to: Path, *, trial: int | None = None, force: bool = False, trusted: Sequence[str] = ()
) -> Exported:
    """Write a trial of a study (by default the best) to the directory `to`.

    Code that the study's record names must be under the current folder, or in `trusted`.
    """
    if to.exists() and not to.is_dir():
        raise SpecError(f"{str(to)!r} is a file", "give a directory with --to")
    _check_free(to, (WEIGHTS, RECORD, PROGRAM), force)
    with open_storage(storage, read_only=True) as opened:
        spec = study_summary(opened, study).spec
    if spec:
        check_trusted(spec, study, trusted)
    result = SearchResult(storage, study, source_from(spec).load if spec else None)
    try:
        number = result.best_trial.number if trial is None else trial
        kept = result.files(number)
        if kept and not result.has_weights(number):
            return _copy_kept(result, number, kept, to, force)
        return _write(result, number, to)
    finally:
        result.close()


def _check_free(to: Path, names: Iterable[str], force: bool) -> None:
    taken = [name for name in names if (to / name).exists()]
    if taken and not force:
        raise SpecError(f"{to / taken[0]} exists already", "give --force to overwrite it, or another --to")


def _copy_kept(result: SearchResult, number: int, kept: Mapping[str, Path], to: Path, force: bool) -> Exported:
    """Copy what an objective kept with its trial, and write the trial's record."""
    _check_free(to, kept, force)
    if RECORD in kept:
        raise InputError(
            f"trial {number} has kept a file called {RECORD}, which is the name of its record here",
            f"copy it from {kept[RECORD]}, or keep it by another name: trial.keep(path, name='...')",
        )
    try:
        exported = Exported(number, [keep_file(path, to, name) for name, path in kept.items()])
        facts = {"study": result.study.study_name, **dataclasses.asdict(result.trials[number])}
        (to / RECORD).write_text(json.dumps(facts, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{to} cannot be written ({error.strerror})", "give another --to") from error
    exported.files.append(to / RECORD)
    return exported


def _write(result: SearchResult, number: int, to: Path) -> Exported:
    weights = result.weights(number)
    # Before writing anything, check that the weights fit the model that `build` makes.
    model = result.model(number) if result.can_build else None
    try:
        to.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(weights, to / WEIGHTS)
    except OSError as error:
        raise InputError(f"{to} cannot be written ({error.strerror})", "give another --to") from error
    exported = Exported(number, [to / WEIGHTS, to / RECORD])
    facts = {"study": result.study.study_name, **dataclasses.asdict(result.trials[number])}
    try:
        if model is None:
            raise InputError("the study was started from a Python script, where its build function is")
        _write_program(result.candidate(number), model.eval(), to / PROGRAM)
        exported.files.append(to / PROGRAM)
    except Exception as error:  # noqa: BLE001 - torch.export may raise anything; the weights are out already
        exported.no_program_because = f"{type(error).__name__}: {error}".splitlines()[0]
        facts["no_program_because"] = exported.no_program_because
    (to / RECORD).write_text(json.dumps(facts, indent=2, default=str) + "\n", encoding="utf-8")
    return exported


def _write_program(candidate: Candidate, model: nn.Module, path: Path) -> None:
    import torch

    positional, keywords, dynamic = _example(candidate)
    with torch.no_grad():
        program = torch.export.export(model, positional, keywords, dynamic_shapes=dynamic)
    torch.export.save(program, path)


def _example(candidate: Candidate) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return an example input of two rows for torch.export, its first dimension dynamic, as batches differ in size."""
    import torch

    from hydra_tune.training.batches import Batches, fetch_rows
    from hydra_tune.training.loaders import LoaderData

    data = candidate.train() if callable(candidate.train) else candidate.train
    if isinstance(data, LoaderData):
        inputs, _targets = Batches(candidate, data, training=True).fetch(0, 0)
    else:
        inputs, _targets = fetch_rows(data, torch.tensor([0, min(1, len(data) - 1)]), candidate.collate)
    if isinstance(inputs, dict):
        return (), dict(inputs), {name: _free_rows(value) for name, value in inputs.items()}
    positional = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    return positional, {}, tuple(_free_rows(value) for value in positional)


def _free_rows(value: Any) -> dict[int, Any] | None:
    import torch

    rows = isinstance(value, torch.Tensor) and value.ndim
    return {0: torch.export.Dim.DYNAMIC} if rows else None
