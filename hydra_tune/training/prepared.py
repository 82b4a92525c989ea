"""A candidate with its loaded data: checked before training starts, and packed for another process.

Only workers whose build returned a candidate import this module: an ordinary objective may not need torch.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import TensorDataset

from hydra_tune.core.errors import CandidateError, quoted
from hydra_tune.core.tensor_memory import has_memory
from hydra_tune.core.trees import call_model
from hydra_tune.engine.transfer import TensorFiles, pack, unpack
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.training.batches import Batches
from hydra_tune.training.builds import Blueprint, rebuilt
from hydra_tune.training.candidate import Candidate, Dataset, Pinned, is_dataset
from hydra_tune.training.remote_trial import TrialInfo

FINGERPRINT_NUMBERS = 4096
"""Numbers of each parameter that go into a fingerprint, about."""


_BUILT_CLASSES = "built classes"
_NO_LIBRARIES = ("torch", "hydra_tune")
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """The build that made a candidate, for a worker to build it again."""

    source_file: str
    info: TrialInfo


@dataclass(frozen=True)
class Prepared:
    """A candidate with its loaded data."""

    candidate: Candidate
    train: Dataset
    valid: Dataset | None
    origin: Origin | None = None
    """None where the candidate was not made by a trial's build."""


@dataclass(frozen=True)
class HasPrepared:
    """Base of the kits in which a prepared candidate travels."""

    prepared: Prepared

    @property
    def candidate(self) -> Candidate:
        return self.prepared.candidate

    @property
    def train(self) -> Dataset:
        return self.prepared.train

    @property
    def valid(self) -> Dataset | None:
        return self.prepared.valid


def prepare(context: WorkerContext, candidate: Candidate, origin: Origin | None = None) -> Prepared:
    """Load and check the data of a candidate that was just built."""
    context.cache.setdefault(_BUILT_CLASSES, set()).update(_classes(candidate.model))
    pinned = isinstance(candidate.train, Pinned)
    train = candidate.train if pinned else load_data(context, candidate.train)
    valid = None if candidate.valid is None else load_data(context, candidate.valid)
    if not pinned:
        _check_data(context, candidate, train, "train", training=True)
        _initialise_lazy_modules(candidate, train)
    if valid is not None:
        _check_data(context, candidate, valid, "valid", training=False)
    return Prepared(candidate, train, valid, origin)


def load_data(context: WorkerContext, data: Dataset | Callable[[], Dataset]) -> Dataset:
    """Return the dataset; one returned by a function is made once per process and shared by all trials."""
    if is_dataset(data):
        return data
    try:
        key = ("data", _identity(data))
        return context.cache[key] if key in context.cache else context.cache.setdefault(key, data())
    except TypeError:  # its closure cannot be compared, so it may be another function
        return data()


def _identity(function: Any) -> Any:
    """Return a key that is equal for equivalent functions: each build may make one with the same code and closure."""
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
    """Raise a CandidateError before training on unusable data."""
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
    # By storage, which trials share; a weak reference, so that a new storage at an old address is checked again.
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


def blueprint_of(prepared: Prepared) -> Blueprint:
    """Describe a candidate by sizes and names, for the coordinator."""
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


def _initialise_lazy_modules(candidate: Candidate, train: Dataset) -> None:
    """Give lazy modules their parameters, by a forward of the first batch."""
    if not any(is_lazy(p) for p in candidate.model.parameters()):
        return
    inputs, _targets = Batches(candidate, train, training=False).fetch(0, 0)
    modes = {module: module.training for module in candidate.model.modules()}
    candidate.model.eval()
    with torch.no_grad():
        call_model(candidate.model, inputs)
    for module, mode in modes.items():
        module.training = mode


def fingerprint(model: nn.Module) -> str:
    """Return a digest of a sample of a model's weights, to tell whether a second build has made the same ones."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if has_memory(parameter):
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // FINGERPRINT_NUMBERS)].clone()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hooked_tensor(model: nn.Module) -> str:
    """Return the name of a parameter or buffer that has a hook, which a pickled copy would lack; empty if none has."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            return name
    return ""


def packed_candidate(context: WorkerContext, prepared: Prepared) -> bytes:
    """Pack a candidate with its data. Raises CandidateError where a copy would not be the same."""
    check_copies(prepared.candidate.model)
    return pack_here(context, prepared)


def check_copies(model: nn.Module) -> None:
    """Raise CandidateError where a pickled copy of a model would lack something."""
    hooked = hooked_tensor(model)
    if hooked:
        raise CandidateError(
            f"the candidate cannot be sent to a device: {hooked!r} has a hook, which a copy would not have",
            "use strategy whole or shard",
        )


def pack_here(context: WorkerContext, thing: Any) -> bytes:
    """Pack an object for any process of this run; its tensors' files live as long as the tensors here."""
    try:
        return pack(thing, tensor_files(context))
    except Exception as error:
        raise CandidateError(
            f"the candidate cannot be sent to a device ({type(error).__name__}: {error})",
            "give it parts that can be pickled, or use --strategy whole",
        ) from error


def receive(context: WorkerContext, parcel: bytes) -> Prepared:
    """Unpack the candidate that the builder packed."""
    prepared = unpack(parcel)
    assert isinstance(prepared, Prepared)
    build_for_libraries(context, prepared.candidate.model, prepared.origin)
    return prepared


def build_for_libraries(context: WorkerContext, model: nn.Module, origin: Origin | None) -> None:
    """Call a candidate's build once in a worker that has only a copy of the candidate, and drop what it makes.

    Libraries note facts about a class when its first object is made (transformers: which outputs can be recorded), and
    look them up in the forward. A copy is not made by its class: in a worker without such an object they lack.
    """
    known: set[str] = context.cache.setdefault(_BUILT_CLASSES, set())
    missing = _classes(model) - known
    if not missing or origin is None:
        return
    try:
        rebuilt(context, origin.source_file, origin.info)
    except Exception as error:  # noqa: BLE001 - user code; the copy is complete for most models
        logger.info("the candidate cannot be built again where a copy of it trains: %s", error)
    known |= missing


def _classes(model: nn.Module) -> set[str]:
    """Return the names of the classes of a model's modules that come from installed packages other than torch."""
    kinds = {type(module) for module in model.modules()}
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if _is_of_library(kind.__module__)}


@functools.cache
def _is_of_library(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.split(".")[0] not in _NO_LIBRARIES and not _INSTALLED.isdisjoint(Path(file).parts)


def tensor_files(context: WorkerContext) -> TensorFiles:
    """Return the files through which this worker passes tensors to others; created on first use."""
    files: TensorFiles | None = context.cache.get("files")
    if files is None:
        name = f"tensors-{context.setup.worker}"
        files = context.cache["files"] = TensorFiles(Path(context.setup.directory), name)
    return files
