"""Runs `build(trial)` in a worker, and defines the plain data that the coordinator gets back.

A build that returns a number is an ordinary Optuna objective and is done when it returns; it runs without torch unless
user code imports it. A candidate stays resident where it was built, or is packed for another process to train.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import optuna

from hydra_tune.core.errors import CandidateError, HydraTuneError, SpecError, quoted
from hydra_tune.core.metric_value import as_number
from hydra_tune.core.seeds import seed_everything
from hydra_tune.engine.unit import TrialEnded
from hydra_tune.training.objective_memory import ObjectiveMemory
from hydra_tune.training.remote_trial import RemoteTrial, TrialInfo
from hydra_tune.training.side_effects import LOST_CHANGE, mutable_state
from hydra_tune.training.source import Build, Source
from hydra_tune.training.trial_line import WorkerLine

if TYPE_CHECKING:
    from hydra_tune.engine.worker import WorkerContext
    from hydra_tune.training.candidate import Candidate
    from hydra_tune.training.prepared import Origin, Prepared

SOURCE_FILE = "source"
"""Name of the file of the build function in the run's directory."""
RETURNED = "the value that the objective returned"
RANK_VARIABLES = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE")
"""Variables that launchers of distributed training leave in the environment, where the next objective would use them.
"""


@dataclass(frozen=True)
class Blueprint:
    """The coordinator's view of a candidate: sizes and names, never tensors."""

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
    """Reason why the model cannot be cut; empty if none is known."""
    partitions: int = 0
    """Number of partitions, if the data is pinned to them."""


@dataclass(frozen=True)
class Built:
    """Result of a build: the values of an objective, or a candidate's blueprint and location."""

    values: tuple[float, ...] | None = None
    blueprint: Blueprint | None = None
    parcel: bytes | None = None
    """The packed candidate; None if it is resident in the worker that built it, or for an objective."""
    stays_because: str = ""
    """Reason why a candidate could not be packed."""
    peak_bytes: int | None = None
    """Memory that an objective took at most, if measured."""


class PrunedByUser(TrialEnded):
    """User code raised TrialPruned."""

    status = "PRUNED"


def write_source(source: Source, directory: str) -> str:
    """Write the build function to a file for all workers of a run: it may hold data, and is sent only once."""
    path = Path(directory) / SOURCE_FILE
    path.write_bytes(pickle.dumps(source))
    return str(path)


def read_source(path: str) -> Source:
    """Read the source that `write_source` wrote in the run's own directory."""
    source: Source = pickle.loads(Path(path).read_bytes())
    return source


def check_build(context: WorkerContext, source_file: str) -> None:
    """Import the build function, so that a mistake in its file is found before a study is made."""
    try:
        _load(context, source_file)
    except HydraTuneError:
        raise
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
        line = f" at {place.filename}:{place.lineno}" if place and not isinstance(error, SyntaxError) else ""
        raise SpecError(
            f"the build function cannot be imported: {type(error).__name__}: {error}{line}", "mend it and search again"
        ) from error


def build_here(context: WorkerContext, source_file: str, info: TrialInfo) -> Built:
    """Build on this device: an objective runs to its end, a candidate stays resident."""
    memory = ObjectiveMemory(context)
    made = _build(context, source_file, info, memory)
    if not _is_candidate(made):
        return Built(values=_objective_values(made, info), peak_bytes=memory.peak())
    from hydra_tune.training.prepared import Origin, blueprint_of, prepare

    prepared = prepare(context, made, Origin(source_file, info))
    context.resident[info.attempt] = prepared
    return Built(blueprint=blueprint_of(prepared))


def build_for_device(context: WorkerContext, source_file: str, info: TrialInfo) -> Built:
    """Build in the builder and pack the candidate for the device that will train it."""
    made = _build(context, source_file, info)
    if not _is_candidate(made):
        return Built(values=_objective_values(made, info))
    from hydra_tune.training.prepared import Origin, blueprint_of, packed_candidate, prepare

    prepared = prepare(context, made, Origin(source_file, info))
    blueprint = blueprint_of(prepared)
    try:
        parcel = packed_candidate(context, prepared)
    except Exception as error:  # noqa: BLE001 - anything may be in a user's candidate; the device builds its own then
        return Built(blueprint=blueprint, stays_because=f"{type(error).__name__}: {error}")
    # Kept until the device has mapped the files, which live as long as their tensors here.
    context.resident[info.attempt] = prepared
    return Built(blueprint=blueprint, parcel=parcel)


def build_and_hold(context: WorkerContext, source_file: str, info: TrialInfo) -> Built:
    """Build in the builder, where the candidate stays until its strategy cuts it."""
    return build_here(context, source_file, info)


def pack_held(context: WorkerContext, attempt: str) -> bytes:
    """Pack a candidate in the builder, for a device that trains it whole after all."""
    from hydra_tune.training.prepared import packed_candidate

    return packed_candidate(context, context.resident[attempt])


def build_again(context: WorkerContext, origin: Origin) -> Prepared:
    """Build a trial's candidate once more, in this worker: the seed is the same, and so are the parameters."""
    from hydra_tune.training.prepared import prepare

    return prepare(context, rebuilt(context, origin.source_file, origin.info), origin)


def rebuilt(context: WorkerContext, source_file: str, info: TrialInfo) -> Candidate:
    """Call the build of a trial that is known to return a candidate."""
    made = _build(context, source_file, info)
    assert _is_candidate(made)
    return made


def _build(context: WorkerContext, source_file: str, info: TrialInfo, memory: ObjectiveMemory | None = None) -> Any:
    build = _load(context, source_file)
    seed_everything(info.seed)
    shared = None if context.cache.get("mutation noted") else mutable_state(build)
    info = replace(info, devices=context.setup.torch_devices)
    trial = RemoteTrial(info, WorkerLine(context), memory)
    ranks = {name: os.environ.get(name) for name in RANK_VARIABLES}
    try:
        made = build(trial)
    except TrialEnded:
        raise
    except optuna.TrialPruned as error:
        raise PrunedByUser from error
    finally:
        for name, value in ranks.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    changed = shared.changed() if shared is not None and not _is_candidate(made) else ""
    if changed:
        context.cache["mutation noted"] = True
        trial.note(LOST_CHANGE, changed)
    return made


def _load(context: WorkerContext, source_file: str) -> Build:
    build: Build | None = context.cache.get("build")
    if build is None:
        build = context.cache["build"] = read_source(source_file).load()
    return build


def _objective_values(made: Any, info: TrialInfo) -> tuple[float, ...]:
    """Return what an objective returned, read as Optuna does: `(1.0,)` and `[1.0]` are 1.0, and `inf` is a value."""
    values = list(made) if isinstance(made, Sequence) and not isinstance(made, str | bytes) else [made]
    if len(values) != info.objectives:
        if info.objectives == 1:
            as_number(made, RETURNED, infinite=True)  # says what a single value may be
        raise CandidateError(
            f"build returned {quoted(made)}",
            f"return a Candidate, or {info.objectives} numbers, one for each metric",
        )
    if info.objectives == 1:
        return (as_number(values[0], RETURNED, infinite=True),)
    return tuple(
        as_number(value, f"value {i} that the objective returned", infinite=True) for i, value in enumerate(values)
    )


def _is_candidate(made: object) -> TypeGuard[Candidate]:
    """True for a candidate, without importing torch: if the class is not imported, no candidate exists."""
    module = sys.modules.get("hydra_tune.training.candidate")
    return module is not None and isinstance(made, module.Candidate)
