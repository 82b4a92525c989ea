"""The end of a round: merges the results of its subnets into the trial's state.

Parts of one subnet only are copied, shared parts are averaged. A pure function of the state, the round and the results.
A subnet without a result leaves its part unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hydra_tune.core.errors import CandidateError
from hydra_tune.strategies.subnets.deal import Dealt, deal, mean, put
from hydra_tune.strategies.subnets.phase import RoundsKit, State

Results = Mapping[int, State]
"""Results of a round, by subnet."""


def assembled(kit: RoundsKit, state: State, results: Results) -> State:
    """Return the state after the round at which `state` stands."""
    turn = state["position"]["turn"]
    parts = deal(kit.structure, kit.subnets, kit.seed, turn)
    dealt = {index: parts[index] for index in results}
    first = results[min(results)]
    tensors = {
        name: _merged(kit, dealt, name, tensor.clone(), {i: r["tensors"].get(name) for i, r in results.items()})
        for name, tensor in state["tensors"].items()
    }
    groups = [first["groups"].get(group, options) for group, options in enumerate(state["groups"])]
    random = [results[i]["random"] if i in results else own for i, own in enumerate(state["random"])]
    return {
        **state,
        "tensors": tensors,
        "optimizer": _optimizer(kit, dealt, state, results),
        "groups": groups,
        "scheduler": first["scheduler"],
        "random": random,
        "position": _position(kit, state["position"], results),
    }


def _position(kit: RoundsKit, position: Mapping[str, Any], results: Results) -> dict[str, Any]:
    return {
        **position,
        "turn": position["turn"] + 1,
        "batch": position["batch"] + kit.local_steps * kit.candidate.accumulate,
        "steps": max(result["steps"] for result in results.values()),
        "loss_sum": position["loss_sum"] + sum(result["loss_sum"] for result in results.values()),
        "loss_rows": position["loss_rows"] + sum(result["loss_rows"] for result in results.values()),
    }


def _merged(
    kit: RoundsKit, dealt: Mapping[int, Dealt], name: str, whole: torch.Tensor, parts: Mapping[int, torch.Tensor | None]
) -> torch.Tensor:
    """Return a tensor of the whole model with the subnets' parts merged in."""
    found = {index: part for index, part in parts.items() if part is not None}
    if kit.structure.is_shared(name):
        return mean(found.values()).to(whole.dtype) if found else whole
    for index, part in found.items():
        put(kit.structure, dealt[index], name, whole, part)
    return whole


def _optimizer(kit: RoundsKit, dealt: Mapping[int, Dealt], state: State, results: Results) -> dict[str, dict[str, Any]]:
    """Merge the optimizer state by parameter: tensors like their parameter, numbers by their maximum."""
    found: dict[str, dict[str, Any]] = {} if not kit.travels else {k: dict(v) for k, v in state["optimizer"].items()}
    names = sorted({name for result in results.values() for name in result["optimizer"]})
    for name in names:
        own = found.setdefault(name, {})
        given = {i: r["optimizer"][name] for i, r in results.items() if name in r["optimizer"]}
        for key in sorted({key for kept in given.values() for key in kept}):
            values = {i: kept[key] for i, kept in given.items() if key in kept}
            some = next(iter(values.values()))
            if torch.is_tensor(some) and some.dim():
                whole = state["tensors"][name]
                _check_shape(name, key, values, results)
                before = own.get(key)
                before = torch.zeros(whole.shape, dtype=some.dtype) if before is None else before.clone()
                own[key] = _merged(kit, dealt, name, before, values)
            elif torch.is_tensor(some) or isinstance(some, int | float):
                own[key] = max([*values.values(), *([own[key]] if key in own else [])], key=float)
            else:
                own[key] = some
    return found


def _check_shape(name: str, key: str, values: Mapping[int, torch.Tensor], results: Results) -> None:
    for index, value in values.items():
        if value.shape != results[index]["tensors"][name].shape:
            raise CandidateError(
                f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {name!r}, whose part in a subnet has "
                f"{tuple(results[index]['tensors'][name].shape)}",
                "give optimizer_state: reset",
            )
