"""Running `build(trial)` in a worker: what it returned, and a first look at the candidate's data.

A build that returns a number is an ordinary Optuna objective and is done when it returns. A candidate stays resident
where it was built, or is packed for another process to train.
"""

from __future__ import annotations

import functools
import os
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
from torch.utils.data import TensorDataset

from hydra_tune.batches import Batches
from hydra_tune.candidate import Candidate, Dataset, Pinned, is_dataset
from hydra_tune.engine.transfer import TensorFiles, pack, unpack
from hydra_tune.engine.unit import TrialEnded
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.errors import CandidateError, quoted
from hydra_tune.remote_trial import RemoteTrial, TrialInfo
from hydra_tune.seeds import seed_everything
from hydra_tune.source import Build, Source
from hydra_tune.training import as_number

RANK_VARIABLES = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE")
"""What launchers of distributed training leave in the environment; the next objective would take it for its own."""


@dataclass(frozen=True)
class Blueprint:
    """What the coordinator knows of a candidate: sizes and names, never tensors."""

    epochs: int
    batches: int
    rows: int
    parameters: int
    parameter_bytes: int
    metrics: tuple[str, ...]
    keep: str
    accumulate: int = 1
    sparsity: float | None = None
    whole_because: str = ""
    """Why the model cannot be cut; empty where nothing is known against it."""
    partitions: int = 0
    """Of data that is pinned to its partitions."""


@dataclass(frozen=True)
class Built:
    """What came of a build: the values of an objective, or a candidate's blueprint and where the candidate is."""

    values: tuple[float, ...] | None = None
    blueprint: Blueprint | None = None
    parcel: bytes | None = None
    """The packed candidate; None when it is resident in the worker that built it, or is a number."""
    stays_because: str = ""
    """Why a candidate could not be packed."""


@dataclass(frozen=True)
class Prepared:
    """A candidate with its data at hand."""

    candidate: Candidate
    train: Dataset
    valid: Dataset | None


class PrunedByUser(TrialEnded):
    """User code raised TrialPruned."""

    status = "PRUNED"


def write_source(source: Source, directory: str) -> str:
    """Put the build function where all workers of a run find it: it may hold data, and travels once, not each time."""
    path = Path(directory) / "source"
    path.write_bytes(pickle.dumps(source))
    return str(path)


def read_source(path: str) -> Source:
    """The source that `write_source` wrote, a moment ago, in the run's own directory."""
    source: Source = pickle.loads(Path(path).read_bytes())
    return source


def build_here(context: WorkerContext, source_file: str, info: TrialInfo) -> Built:
    """Build on this device: an objective runs to its end, a candidate stays resident."""
    made = _build(context, source_file, info)
    if not isinstance(made, Candidate):
        return Built(values=_objective_values(made, info))
    prepared = _prepare(context, made)
    context.resident[info.attempt] = prepared
    return Built(blueprint=_blueprint(prepared))


def build_for_device(context: WorkerContext, source_file: str, info: TrialInfo) -> Built:
    """Build in the builder and pack the candidate for whichever device will train it."""
    made = _build(context, source_file, info)
    if not isinstance(made, Candidate):
        return Built(values=_objective_values(made, info))
    prepared = _prepare(context, made)
    blueprint = _blueprint(prepared)
    try:
        parcel = pack(prepared, _tensor_files(context))
    except Exception as error:  # noqa: BLE001 - anything may be in a user's candidate; the device builds its own then
        return Built(blueprint=blueprint, stays_because=f"{type(error).__name__}: {error}")
    # Kept until the device has mapped the files, which live as long as the tensors they came from.
    context.resident[info.attempt] = prepared
    return Built(blueprint=blueprint, parcel=parcel)


def build_and_hold(context: WorkerContext, source_file: str, info: TrialInfo) -> Built:
    """Build in the builder, where the candidate stays until its strategy takes it apart."""
    return build_here(context, source_file, info)


def pack_held(context: WorkerContext, attempt: str) -> bytes:
    """Pack a candidate that waits in the builder, for a device that trains it as a whole after all."""
    return pack_here(context, context.resident[attempt])


def pack_here(context: WorkerContext, thing: Any) -> bytes:
    """Pack for any process of this run; its tensors' files live as long as they do here."""
    try:
        return pack(thing, _tensor_files(context))
    except Exception as error:
        raise CandidateError(
            f"the candidate cannot be sent to a device ({type(error).__name__}: {error})",
            "give it parts that can be pickled, or use --strategy whole",
        ) from error


def receive(parcel: bytes) -> Prepared:
    """The candidate that the builder packed, in this process."""
    prepared = unpack(parcel)
    assert isinstance(prepared, Prepared)
    return prepared


def _build(context: WorkerContext, source_file: str, info: TrialInfo) -> Any:
    build: Build | None = context.cache.get("build")
    if build is None:
        build = context.cache["build"] = read_source(source_file).load()
    seed_everything(info.seed)
    ranks = {name: os.environ.get(name) for name in RANK_VARIABLES}
    try:
        return build(RemoteTrial(info, context))
    except TrialEnded:
        raise
    except optuna.TrialPruned as error:
        raise PrunedByUser from error
    finally:
        for name, value in ranks.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _objective_values(made: Any, info: TrialInfo) -> tuple[float, ...]:
    if info.objectives == 1:
        return (as_number(made, "the value that build returned"),)
    if not isinstance(made, tuple | list) or len(made) != info.objectives:
        raise CandidateError(
            f"build returned {quoted(made)}",
            f"return a Candidate, or {info.objectives} numbers, one for each metric",
        )
    return tuple(as_number(value, f"value {i} that build returned") for i, value in enumerate(made))


def _prepare(context: WorkerContext, candidate: Candidate) -> Prepared:
    pinned = isinstance(candidate.train, Pinned)
    train = candidate.train if pinned else load_data(context, candidate.train)
    valid = None if candidate.valid is None else load_data(context, candidate.valid)
    if not pinned:
        _check_data(context, candidate, train, "train", training=True)
    if valid is not None:
        _check_data(context, candidate, valid, "valid", training=False)
    return Prepared(candidate, train, valid)


def load_data(context: WorkerContext, data: Dataset | Callable[[], Dataset]) -> Dataset:
    """The dataset itself; one that a function returns is made once per process and shared by all trials."""
    if is_dataset(data):
        return data
    try:
        key = ("data", _identity(data))
        return context.cache[key] if key in context.cache else context.cache.setdefault(key, data())
    except TypeError:  # what it closes over cannot be compared, so nobody knows whether it is the same function
        return data()


def _identity(function: Any) -> Any:
    """Equal for functions that do the same: a function made anew by each build has the same code and closure."""
    if isinstance(function, functools.partial):
        return (_identity(function.func), function.args, tuple(sorted(function.keywords.items())))
    code = getattr(function, "__code__", None)
    if code is None:
        return function
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    identity = (code, cells, function.__defaults__)
    hash(identity)
    return identity


def _check_data(context: WorkerContext, candidate: Candidate, data: Dataset, name: str, *, training: bool) -> None:
    """Fail before training starts on data that cannot be trained on."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise CandidateError(f"Candidate.{name} gave {quoted(data)}", "give a map-style dataset")
    if len(data) == 0:
        raise CandidateError(f"Candidate.{name} has no rows", "give a dataset with at least one row")
    batches = Batches(candidate, data, training=training)
    if len(batches) == 0:
        raise CandidateError(
            f"Candidate.{name} has {len(data)} rows, less than one batch of {candidate.batch_size}",
            "use a smaller batch_size, or drop_last=False",
        )
    if type(data) is TensorDataset:
        _check_finite(context, data, name)
        return
    try:
        batches.fetch(0, 0)
    except CandidateError:
        raise
    except Exception as error:
        raise CandidateError(
            f"Candidate.{name}: its first batch cannot be made ({type(error).__name__}: {error})",
            "rows of one batch must have equal shapes, or collate must pad them",
        ) from error


def _check_finite(context: WorkerContext, data: TensorDataset, name: str) -> None:
    # By storage, which trials share; a weak reference, so that a new storage at an old address is looked at again.
    checked: weakref.WeakValueDictionary[int, torch.UntypedStorage]
    checked = context.cache.setdefault("finite", weakref.WeakValueDictionary())
    for tensor in data.tensors:
        storage = tensor.untyped_storage()
        if not tensor.is_floating_point() or checked.get(storage._cdata) is storage:
            continue
        wrong = ~torch.isfinite(tensor)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            raise CandidateError(f"Candidate.{name} has NaN or infinite values (row {row})", "fill or drop such rows")
        checked[storage._cdata] = storage


def _blueprint(prepared: Prepared) -> Blueprint:
    candidate = prepared.candidate
    parameters = list(candidate.model.parameters())
    pinned = isinstance(prepared.train, Pinned)
    return Blueprint(
        epochs=candidate.epochs,
        batches=0 if pinned else len(Batches(candidate, prepared.train, training=True)),
        rows=0 if pinned else len(prepared.train),
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        metrics=("loss", "train_loss", *candidate.metrics) if prepared.valid is not None else ("loss", "train_loss"),
        keep=candidate.keep,
        accumulate=candidate.accumulate,
        sparsity=candidate.sparsity,
        whole_because=candidate.whole_because,
        partitions=len(prepared.train.partitions) if pinned else 0,
    )


def _tensor_files(context: WorkerContext) -> TensorFiles:
    files: TensorFiles | None = context.cache.get("files")
    if files is None:
        name = f"tensors-{context.setup.worker}"
        files = context.cache["files"] = TensorFiles(Path(context.setup.directory), name)
    return files
