"""The strategies by name: built-in ones, and those of other packages.

A package registers a strategy with an entry point in the group `hydra_tune.strategies` whose value is a subclass of
`Strategy`. Strategies are found by the `name` of the class.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.strategies.base import Strategy
from hydra_tune.strategies.elastic.strategy import Elastic
from hydra_tune.strategies.pack.strategy import Pack
from hydra_tune.strategies.pipeline.strategy import Pipeline
from hydra_tune.strategies.shard.strategy import Shard
from hydra_tune.strategies.sparse.strategy import Sparse
from hydra_tune.strategies.subnets.strategy import Ist
from hydra_tune.strategies.whole.strategy import Whole

logger = logging.getLogger(__name__)

GROUP = "hydra_tune.strategies"
BUILT_IN: dict[str, type[Strategy]] = {kind.name: kind for kind in (Whole, Shard, Pipeline, Pack, Sparse, Ist, Elastic)}
"""Built-in strategies: exact ones first, and simpler ones before complex ones."""


@functools.cache
def brought() -> dict[str, type[Strategy]]:
    """Load the strategies of other packages; skip unusable ones with a warning."""
    found: dict[str, type[Strategy]] = {}
    for entry in entry_points(group=GROUP):
        try:
            kind = entry.load()
        except Exception as error:  # noqa: BLE001 - another package's code
            logger.warning("strategy %s (%s) cannot be loaded: %s", entry.name, entry.value, error)
            continue
        if not (isinstance(kind, type) and issubclass(kind, Strategy)):
            logger.warning("strategy %s (%s) is no subclass of Strategy", entry.name, entry.value)
        elif kind.name in BUILT_IN or kind.name in found:
            logger.warning("strategy %s (%s) has the name of another one", kind.name, entry.value)
        else:
            found[kind.name] = kind
    return found


def known() -> dict[str, type[Strategy]]:
    """Return all strategies by name, built-in ones first."""
    return {**BUILT_IN, **brought()}


def find_strategy(name: str) -> type[Strategy] | None:
    """Return the strategy of this name, or None."""
    return BUILT_IN.get(name) or brought().get(name)


def make_strategy(name: Any, options: Mapping[str, Any], others: Sequence[str] = ()) -> Strategy:
    """Return the strategy of this name with these options; the hint for an unknown name also considers `others`."""
    kind = find_strategy(name) if isinstance(name, str) else None
    if kind is None:
        raise SpecError(f"strategy cannot be {quoted(name)}", nearest(str(name), [*others, *known()]))
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    taken = [field.name for field in fields if field.init]
    for option in options:
        if option not in taken:
            raise SpecError(
                f"strategy {name!r} has no option {quoted(option)}",
                nearest(str(option), taken) if taken else "it takes none",
            )
    return kind(**options)
