"""The strategies by name, and what a user's `strategy` argument means."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hydra_tune.errors import SpecError, nearest, quoted
from hydra_tune.strategies.base import Strategy
from hydra_tune.strategies.elastic import Elastic
from hydra_tune.strategies.ist import Ist
from hydra_tune.strategies.pipeline import Pipeline
from hydra_tune.strategies.shard import Shard
from hydra_tune.strategies.sparse import Sparse
from hydra_tune.strategies.whole import Whole

_STRATEGIES: dict[str, type[Strategy]] = {}


def register(strategy: type[Strategy]) -> None:
    """Make a strategy known by its name; a name can be taken once."""
    if strategy.name in _STRATEGIES:
        raise ValueError(f"strategy {strategy.name!r} is registered already, by {_STRATEGIES[strategy.name]}")
    _STRATEGIES[strategy.name] = strategy


def known() -> dict[str, type[Strategy]]:
    """All strategies by name."""
    return dict(_STRATEGIES)


def resolve(choice: str | Mapping[str, Any], *, budgeted: bool = False) -> Strategy:
    """The strategy that `choice` names, by a name or a dict of a name and options.

    `auto` is `shard` where devices have been given a budget, for candidates that do not fit it, and else `whole`.
    """
    options = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise SpecError(f"strategy cannot be {quoted(choice)}", "give a name, or name: and options")
    if name == "auto":
        name = Shard.name if budgeted else Whole.name
    if name not in _STRATEGIES:
        raise SpecError(f"strategy cannot be {quoted(name)}", nearest(str(name), ["auto", *_STRATEGIES]))
    taken = [field.name for field in dataclasses.fields(_STRATEGIES[name])]  # type: ignore[arg-type]
    for option in options:
        if option not in taken:
            raise SpecError(
                f"strategy {name!r} has no option {quoted(option)}",
                nearest(option, taken) if taken else "it takes none",
            )
    return _STRATEGIES[name](**options)


register(Whole)
register(Shard)
register(Pipeline)
register(Sparse)
register(Ist)
register(Elastic)
