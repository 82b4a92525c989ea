"""The strategies by name, and what a user's `strategy` argument means."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hydra_tune.errors import SpecError, nearest, quoted
from hydra_tune.planning.choice import APPROXIMATE, EXACT
from hydra_tune.strategies.auto import Auto
from hydra_tune.strategies.base import Strategy
from hydra_tune.strategies.elastic import Elastic
from hydra_tune.strategies.ist import Ist
from hydra_tune.strategies.pipeline import Pipeline
from hydra_tune.strategies.shard import Shard
from hydra_tune.strategies.sparse import Sparse
from hydra_tune.strategies.whole import Whole

CHOOSING = ("auto", "any", "search")
"""Names that stand for a choice among strategies."""
_STRATEGIES: dict[str, type[Strategy]] = {}


def register(strategy: type[Strategy]) -> None:
    """Make a strategy known by its name; a name can be taken once."""
    if strategy.name in _STRATEGIES:
        raise ValueError(f"strategy {strategy.name!r} is registered already, by {_STRATEGIES[strategy.name]}")
    _STRATEGIES[strategy.name] = strategy


def known() -> dict[str, type[Strategy]]:
    """All strategies by name."""
    return dict(_STRATEGIES)


def resolve(choice: object, *, budgeted: bool = False) -> Strategy:
    """The strategy that `choice` means: a name, a dict of a name and options, or several of these to choose from.

    `auto` chooses for each trial among the exact strategies, `any` among all, and `search` lets the sampler choose.
    Where devices have been given a budget, candidates are built apart from the first one on: they may not fit.
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
            return Auto(among=_made(EXACT), apart=budgeted)
        case "any":
            return Auto(among=_made((*EXACT, *APPROXIMATE)), apart=budgeted)
        case "search":
            return Auto(among=_made((*EXACT, *APPROXIMATE)), apart=budgeted, drawn=True)
    return _one(name, options)


def _chosen_from(choices: Sequence[Any], budgeted: bool) -> Strategy:
    if not choices:
        raise SpecError("strategy is an empty list", f"name some of {', '.join(_STRATEGIES)}")
    found = {}
    for each in choices:
        options = dict(each) if isinstance(each, Mapping) else {"name": each}
        strategy = _one(options.pop("name", None), options)
        if strategy.name in found:
            raise SpecError(f"strategy {strategy.name!r} is named twice", "name each once")
        found[strategy.name] = strategy
    order = [name for name in (*EXACT, *APPROXIMATE) if name in found]
    return Auto(among=tuple(found[name] for name in order), apart=budgeted)


def _made(names: Sequence[str]) -> tuple[Strategy, ...]:
    return tuple(_STRATEGIES[name]() for name in names)


def _one(name: Any, options: Mapping[str, Any]) -> Strategy:
    if not isinstance(name, str) or name not in _STRATEGIES:
        raise SpecError(f"strategy cannot be {quoted(name)}", nearest(str(name), [*CHOOSING, *_STRATEGIES]))
    taken = [field.name for field in dataclasses.fields(_STRATEGIES[name]) if field.init]  # type: ignore[arg-type]
    for option in options:
        if option not in taken:
            raise SpecError(
                f"strategy {name!r} has no option {quoted(option)}",
                nearest(str(option), taken) if taken else "it takes none",
            )
    return _STRATEGIES[name](**options)


register(Whole)
register(Shard)
register(Pipeline)
register(Sparse)
register(Ist)
register(Elastic)
