"""Units of packed trials, run in the worker that holds their members: load, train, checkpoint, save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra_tune.engine.unit import Failure
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.strategies.epochs import SavedCheckpoint
from hydra_tune.strategies.pack.member import Member
from hydra_tune.strategies.pack.pack import Pack
from hydra_tune.strategies.pack.refusal import CannotPack
from hydra_tune.strategies.pack.signature import signature
from hydra_tune.strategies.pack.turn import Arrived, Trained, Turn
from hydra_tune.strategies.whole.units import OutOfMemory, restore, write_checkpoint
from hydra_tune.training.prepared import Prepared, receive


def load(context: WorkerContext, attempt: str, seed: int, parcel: bytes | None, checkpoints: Path) -> Arrived:
    """Prepare the candidate for training, from a checkpoint if there is one, and return its signature."""
    prepared: Prepared = context.resident[attempt] if parcel is None else receive(context, parcel)
    member = Member(prepared.candidate, prepared.train, prepared.valid, seed, context.device)
    context.resident[attempt] = member
    loaded = restore(member, checkpoints)
    try:
        return Arrived(loaded, member.batch, signature(member))
    except CannotPack as error:
        return Arrived(loaded, member.batch, refused=str(error))


def train(context: WorkerContext, attempts: Sequence[str], kept: Sequence[str], seconds: float) -> Turn:
    """Train these members for about `seconds`, at most to the end of the epoch, which is then evaluated.

    The weights of the `kept` ones are those of their best epoch so far.
    """
    members: dict[str, Member] = {attempt: context.resident[attempt] for attempt in attempts}
    for attempt in kept:
        members[attempt].keep_weights()
    if len(members) == 1:
        ((attempt, member),) = members.items()
        return Turn({attempt: _alone(context, member, seconds)})
    try:
        return _together(context, members, seconds)
    except CannotPack as error:
        return Turn({}, refused=str(error))


def _alone(context: WorkerContext, member: Member, seconds: float) -> Trained:
    """Train one member by the plain loop."""
    progress = member.train_for(seconds)
    context.unit_peak_bytes = member.peak_bytes
    if member.peak_bytes > context.setup.memory:
        raise OutOfMemory(member.peak_bytes, context.setup.memory, context.setup.device)
    return Trained(progress, member.end_epoch() if progress.epoch_done else None)


def _together(context: WorkerContext, members: dict[str, Member], seconds: float) -> Turn:
    pack = _pack_of(context, list(members.values()))
    found = pack.train_for(seconds)
    done = bool(pack.members) and pack.members[0].batch >= len(pack.members[0].batches)
    judged = pack.end_epoch() if done else {}
    failures, pack.failures = pack.failures, {}
    context.unit_peak_bytes = pack.peak_bytes // len(members)
    results = {}
    for attempt, member in members.items():
        error = failures.get(member)
        if error is None:
            results[attempt] = Trained(found[member], judged.get(member))
        else:
            results[attempt] = Trained(failure=Failure.of(error))
    fits = len(members) * context.setup.memory // pack.peak_bytes if pack.peak_bytes > context.setup.memory else None
    return Turn(results, fits=None if fits is None else max(1, fits))


def _pack_of(context: WorkerContext, members: list[Member]) -> Pack:
    """Return the pack of exactly these members, formed anew if it has others."""
    present = members[0].pack
    if present is not None and set(present.members) == set(members):
        return present
    for pack in {member.pack for member in members if member.pack is not None}:
        pack.end()
    compared: dict[str, set[Any]] = context.cache.setdefault("compared packs", {})
    return Pack(members, compared=compared.setdefault(signature(members[0]), set()))


def checkpoint(context: WorkerContext, attempt: str, kept: bool, directory: Path) -> SavedCheckpoint:
    """Write the state that another process needs to resume from here, alone or in a pack."""
    member: Member = context.resident[attempt]
    if kept:
        member.keep_weights()
    return write_checkpoint(directory, member.epoch * len(member.batches) + member.batch, member.state)


def save(context: WorkerContext, attempt: str, kept: bool, path: Path) -> None:
    """Write the final weights."""
    member: Member = context.resident[attempt]
    if kept:
        member.keep_weights()
    member.save(path)
