"""Estimate for strategy `pack`, from a rehearsal of a few members side by side with a plain loop.

A pack is never assumed to be quicker: small models gain several times, wide ones lose. The gain of more members than
were rehearsed is not counted on. The first trial of a shape is not rehearsed: a search over widths may have no second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hydra_tune.core.measurements import keep, kept
from hydra_tune.strategies.estimate import Estimate, Look, Rehearsal, not_rehearsed, refused
from hydra_tune.strategies.pack.member import Member
from hydra_tune.strategies.pack.pack import Pack
from hydra_tune.strategies.pack.refusal import CannotPack, reason
from hydra_tune.strategies.pack.signature import signature
from hydra_tune.strategies.pack.strategy import SIZE
from hydra_tune.strategies.pool import Pool

REHEARSED = 8
"""Members of a rehearsal."""
FIRST = 3
"""Batches before any is timed: they form the pack, compare it, and make the optimizer's state."""
TIMED_SECONDS = 0.2
LONGEST_BATCH = 0.03
"""Seconds of a plain batch beyond which no pack is rehearsed: its kernels keep a device busy by themselves."""

NOT_YET = "no other trial of its shape has come yet"


def estimate(look: Look, pool: Pool) -> Estimate:
    """Return the time of as many members as fit a device, or the reason why a pack would not be quicker."""
    found = look.rehearsal
    if found is None:
        return refused("pack", not_rehearsed(look))
    if found.batch_seconds > LONGEST_BATCH:
        return refused("pack", f"a batch takes {1000 * found.batch_seconds:.0f} ms: nothing to gain from packing")
    members = min(SIZE, pool.memory // max(1, found.peak_bytes))
    if members < 2:
        return refused("pack", "a device holds only one of it")
    try:
        key = signature(Member.of(look.prepared, look.training.device))
        batch_seconds, judge_seconds = _measured(look, key, found, min(members, REHEARSED))
    except CannotPack as error:
        return refused("pack", str(error))
    epoch = look.epoch
    one = epoch.batches * batch_seconds + epoch.valid_batches * judge_seconds
    return Estimate(
        strategy="pack", seconds=members * one, work=one, batch_seconds=members * batch_seconds,
        device_bytes=members * found.peak_bytes, held_bytes=members * found.state_bytes,
        host_bytes=members * found.peak_bytes if pool.cpu else 0, parts=members, members=members, signature=key,
    )  # fmt: skip


def _measured(look: Look, key: str, found: Rehearsal, members: int) -> tuple[float, float]:
    """Return the seconds of a training batch and of a validation batch for each member; measured once per signature."""
    path = look.profiles / f"pack-{key}-{members}.json"
    stored = kept(path)
    origin = look.prepared.origin
    first = "" if origin is None else str(origin.info.seed)
    if stored is None or (first and stored.get("first") == first):
        keep(path, {"first": first})
        raise CannotPack(NOT_YET)
    if not {"batch", "judge", "refused"} <= stored.keys():
        stored = _rehearsed(look, found, members)
        keep(path, stored)
    if stored["refused"]:
        raise CannotPack(str(stored["refused"]))
    return float(stored["batch"]), float(stored["judge"])


def _rehearsed(look: Look, found: Rehearsal, members: int) -> dict[str, float | str]:
    made = [Member.of(prepared, look.training.device, seed) for seed, prepared in enumerate(look.copies(members))]
    try:
        return {**_timed(made, found), "refused": ""}
    except CannotPack as error:
        return {"batch": 0.0, "judge": 0.0, "refused": reason(error)}


def _timed(members: Sequence[Member], plain: Rehearsal) -> dict[str, float]:
    pack = Pack(members)
    seconds, batches = 0.0, 0
    for turn in range(1000):
        if not pack.members or seconds > TIMED_SECONDS:
            break
        for member in pack.members:
            member.batch %= len(member.batches)
        began = time.thread_time()
        pack.train_while(lambda: False)
        if turn >= FIRST:
            seconds, batches = seconds + time.thread_time() - began, batches + 1
    if not pack.members or not batches:
        raise CannotPack("its rehearsal failed")
    began = time.thread_time()
    valid = members[0].valid
    if valid is not None:
        pack.end_epoch()
    judged = (time.thread_time() - began) / (len(valid) * len(members)) if valid is not None else plain.judge_seconds
    pack.end()
    return {"batch": seconds / batches / len(members), "judge": judged}
