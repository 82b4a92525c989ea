"""The plan of a pruned trial for people: its survivors, and its bytes compared to a dense network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hydra_tune.core.devices import format_bytes
from hydra_tune.core.tables import Table
from hydra_tune.strategies.pipeline import plan_table as stages

Plan = Mapping[str, Any]


def describe(plan: Plan) -> Iterator[str | Table]:
    """Yield a line on replicas, stages or shards and the survivors, then a table of bytes or of stages."""
    way = plan.get("way", "replicas")
    if plan["phase"] == "dense":
        where = "in shards" if way == "shards" else _count(plan["replicas"], "replica")
        yield f"{where}, in dense training: its mask ({plan['mask']}) had not settled"
    else:
        where = {"replicas": _replicas, "stages": _stages, "shards": _shards}[way](plan)
        yield (
            f"{where}, {plan['survivors']} of {plan['pruned_weights']} weights survive (mask: {plan['mask']}, "
            f"{plan['precision']} precision)"
        )
    if way == "replicas":
        yield _against_dense(plan)
    elif "stages" in plan:
        yield from stages.describe(plan)


def _replicas(plan: Plan) -> str:
    return _count(plan["replicas"], "replica")


def _stages(plan: Plan) -> str:
    dense = plan["dense_stages"]
    needed = "would not fit any number" if dense is None else f"would need {dense}"
    return f"{_count(plan['devices'], 'stage')}; dense {needed}"


def _shards(plan: Plan) -> str:
    state, weights = format_bytes(plan["state_bytes"]), format_bytes(plan["weight_bytes"])
    return f"{_count(plan['shards'], 'shard')} of {state} of state, {weights} of it dense weights"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _against_dense(plan: Plan) -> Table:
    table = Table(["", "bytes", "dense", "saved"], numeric=frozenset({"bytes", "dense", "saved"}))
    for what, name in (("state of a replica", "state_bytes"), ("gradients of a step", "step_bytes")):
        own, dense = plan[name], plan[f"dense_{name}"]
        table.rows.append([what, format_bytes(own), format_bytes(dense), f"{1 - own / dense:.1%}" if dense else ""])
    return table
