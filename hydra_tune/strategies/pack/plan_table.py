"""The recorded plan of a packed trial: its companions, or why it had none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hydra_tune.core.tables import Table
from hydra_tune.strategies.pack.bench import Seat

SHOWN = 12
"""Numbers of companions that are shown."""


def plan_of(seat: Seat) -> dict[str, Any]:
    """Return a trial's companions as plain data."""
    return {
        "members": seat.most, "mean_members": round(seat.mean_members, 2), "with": sorted(seat.companions),
        "signature": seat.signature, "alone_because": seat.refused,
    }  # fmt: skip


def shown(plan: Mapping[str, Any]) -> Iterable[str | Table]:
    """Yield the plan as lines for people."""
    if plan.get("alone_because"):
        yield f"trained alone: {plan['alone_because']}"
    companions = plan.get("with", [])
    if not companions:
        if not plan.get("alone_because"):
            yield "trained alone: no other trial of its shape was there"
        return
    named = ", ".join(map(str, companions[:SHOWN])) + (", ..." if len(companions) > SHOWN else "")
    yield (
        f"trained as one of up to {plan['members']} members, {plan['mean_members']:g} on average, "
        f"with {len(companions)} other trials: {named}"
    )
