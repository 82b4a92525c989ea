"""Resolves a user's `strategy` argument: one strategy, or a choice among several for each trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra_tune.core.errors import SpecError, quoted
from hydra_tune.planner.auto import Auto
from hydra_tune.planner.choice import APPROXIMATE, EXACT
from hydra_tune.strategies.base import Strategy
from hydra_tune.strategies.registry import known, make_strategy

CHOOSING = ("auto", "any", "search")
"""Names for a choice among strategies."""


def resolve(choice: object, *, budgeted: bool = False) -> Strategy:
    """Return the strategy for `choice`: a name, a dict of a name and options, or several of these to choose from.

    `auto` chooses for each trial among the exact strategies, `any` among all, and `search` lets the sampler choose.
    With a device budget, candidates are built apart from the first one on: they may not fit.
    """
    if isinstance(choice, str) and "," in choice:
        choice = [name.strip() for name in choice.split(",")]
    if isinstance(choice, list | tuple):
        return _chosen_from(choice, budgeted)
    options = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise SpecError(f"strategy cannot be {quoted(choice)}", "give a name, or name: and options")
    if name in CHOOSING and options:
        raise SpecError(f"strategy {name!r} has no option {quoted(next(iter(options)))}", "it takes none")
    match name:
        case "auto":
            return Auto(among=_defaults(EXACT), apart=budgeted)
        case "any":
            return Auto(among=_defaults((*EXACT, *APPROXIMATE)), apart=budgeted)
        case "search":
            return Auto(among=_defaults((*EXACT, *APPROXIMATE)), apart=budgeted, drawn=True)
    return make_strategy(name, options, CHOOSING)


def _chosen_from(choices: Sequence[Any], budgeted: bool) -> Strategy:
    if not choices:
        raise SpecError("strategy is an empty list", f"name some of {', '.join(known())}")
    found = {}
    for each in choices:
        options = dict(each) if isinstance(each, Mapping) else {"name": each}
        strategy = make_strategy(options.pop("name", None), options, CHOOSING)
        if strategy.name in found:
            raise SpecError(f"strategy {strategy.name!r} is named twice", "name each once")
        found[strategy.name] = strategy
    order = [name for name in known() if name in found]
    return Auto(among=tuple(found[name] for name in order), apart=budgeted)


def _defaults(names: Sequence[str]) -> tuple[Strategy, ...]:
    return tuple(known()[name]() for name in names)
