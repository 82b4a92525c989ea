"""A declared search space: parameters, some of which exist only when earlier ones allow it.

A Space is data: it can be listed, narrowed, enumerated (`grid`), addressed by a point of the unit cube (`at`)
and pickled, which a function full of `trial.suggest_*` calls cannot. `suggest` walks it with an Optuna trial.

Two kinds of condition suffice: `OneOf("family", ("mlp",))` and `Above("depth", 2)`. A condition on a
parameter that does not exist in an assignment is false, so conditions nest without being combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces import distributions, overrides
from hydra_tune.search_spaces.distributions import Value

Assignment: TypeAlias = dict[str, Any]

LARGEST_LISTED_RANGE = 64
"""Longest range of whole numbers in a grid: a longer one, such as 1,000 widths, is probably a mistake."""

LARGEST_GRID = 100_000
"""Most assignments that are listed; no study trains as many."""


class Suggests(Protocol):
    """The trial interface that `Space.suggest` needs: Optuna's trial, or anything that suggests like it."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Return one of the choices."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return a whole number in the range."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number in the range."""


@dataclass(frozen=True)
class OneOf:
    """True if the parameter `name` exists and has one of `values`."""

    name: str
    values: tuple[Value, ...]

    def holds(self, params: Mapping[str, Any]) -> bool:
        return self.name in params and params[self.name] in self.values

    def possible(self, distribution: BaseDistribution) -> bool:
        """True if some value of the named parameter's distribution fulfils the condition."""
        return any(distributions.contains(distribution, value) for value in self.values)


@dataclass(frozen=True)
class Above:
    """True if the parameter `name` exists and is greater than `bound`."""

    name: str
    bound: float

    def holds(self, params: Mapping[str, Any]) -> bool:
        return self.name in params and params[self.name] > self.bound

    def possible(self, distribution: BaseDistribution) -> bool:
        """True if some value of the named parameter's distribution fulfils the condition."""
        return distributions.highest(distribution) > self.bound


Condition: TypeAlias = OneOf | Above


@dataclass(frozen=True)
class Param:
    """A parameter: its name, its distribution, and the condition for its existence (`when=None`: always).

    `limits` are the smallest and largest sensible numbers. A search uses the distribution by default; an override may
    leave it, but not the limits. Without limits, overrides can only narrow.
    """

    name: str
    distribution: BaseDistribution
    when: Condition | None = None
    limits: tuple[float, float] | None = None

    def exists(self, params: Mapping[str, Any]) -> bool:
        return self.when is None or self.when.holds(params)

    @property
    def listable(self) -> bool:
        """True if a grid can list all values: false for continuous and long ranges."""
        number = distributions.count(self.distribution)
        choice = isinstance(self.distribution, CategoricalDistribution)
        return number is not None and (choice or number <= LARGEST_LISTED_RANGE)

    def values(self) -> list[Value]:
        """Return all values of a listable parameter."""
        return distributions.values(self.distribution)

    def example(self) -> str:
        """Return an example list of values for an override: `lr: [0.001, 0.0032, 0.01]`."""
        few = (distributions.value_at(self.distribution, u) for u in (0.0, 0.5, 1.0))
        texts = (f"{value:.2g}" if isinstance(value, float) else str(value) for value in few)
        return f"{overrides.stem(self.name)}: [{', '.join(texts)}]"

    def __str__(self) -> str:
        return distributions.describe(self.distribution)


@dataclass(frozen=True)
class Space:
    """Parameters in the order in which they are asked for. A condition refers only to earlier ones."""

    params: tuple[Param, ...]

    def __post_init__(self) -> None:
        known: set[str] = set()
        for param in self.params:
            if param.name in known:
                raise SpecError(f"the parameter {param.name!r} is declared twice", "give each its own name")
            if param.when is not None and param.when.name not in known:
                raise SpecError(
                    f"the condition of {param.name!r} names {param.when.name!r}, which is not declared yet",
                    "declare the deciding parameter first",
                )
            known.add(param.name)

    @classmethod
    def choice(cls, name: str, spaces: Mapping[str, Space]) -> Space:
        """Return a choice of several spaces: `name` selects one, and prefixes its parameters' names, as in `mlp.lr`.

        With a prefix, a name has the same distribution in every trial, which Optuna's samplers rely on.
        """
        params = [Param(name, CategoricalDistribution(tuple(spaces)))]
        for label, space in spaces.items():
            params += [_prefixed(param, label, OneOf(name, (label,))) for param in space.params]
        return cls(tuple(params))

    def suggest(self, trial: Suggests) -> Assignment:
        """Ask a trial for every parameter that exists, in order."""
        return self._assign(lambda param: _suggested(trial, param))

    def at(self, point: Sequence[float]) -> Assignment:
        """Return the assignment at a point of the unit cube, with one coordinate per declared parameter.

        The coordinates of parameters that do not exist there are not used.
        """
        if len(point) != len(self.params):
            raise ValueError(f"a point of this space has {len(self.params)} coordinates, not {len(point)}")
        coordinate = {param.name: float(u) for param, u in zip(self.params, point, strict=True)}
        return self._assign(lambda param: distributions.value_at(param.distribution, coordinate[param.name]))

    def _assign(self, value_of: Callable[[Param], Any]) -> Assignment:
        params: Assignment = {}
        for param in self.params:
            if param.exists(params):
                params[param.name] = value_of(param)
        return params

    def size(self) -> int:
        """Return the number of assignments in `grid`, counted without listing them."""
        self._check_listable()
        deciding = {param.when.name for param in self.params if param.when is not None}

        def below(index: int, decided: Assignment) -> int:
            if index == len(self.params):
                return 1
            param = self.params[index]
            if not param.exists(decided):
                return below(index + 1, decided)
            values = param.values()
            if param.name not in deciding:
                return len(values) * below(index + 1, decided)
            return sum(below(index + 1, {**decided, param.name: value}) for value in values)

        return below(0, {})

    def grid(self) -> list[Assignment]:
        """Return every assignment once: the leaves of the tree of conditions."""
        size = self.size()
        if size > LARGEST_GRID:
            hint = "narrow it in overrides, or use the sampler 'random' or 'qmc'"
            raise SpecError(f"the grid has {size:,} assignments, more than {LARGEST_GRID:,}", hint)
        return list(self._leaves(0, {}))

    def _check_listable(self) -> None:
        endless = [param for param in self.narrowed({}).params if not param.listable]
        if endless:
            names = ", ".join(dict.fromkeys(f"{overrides.stem(param.name)!r} ({param})" for param in endless))
            lists = ", ".join(dict.fromkeys(param.example() for param in endless))
            hint = f"give lists in overrides, such as {lists}"
            raise SpecError(f"a grid cannot go through all values of {names}", hint)

    def _leaves(self, index: int, params: Assignment) -> Iterator[Assignment]:
        if index == len(self.params):
            yield params
            return
        param = self.params[index]
        if not param.exists(params):
            yield from self._leaves(index + 1, params)
            return
        for value in param.values():
            yield from self._leaves(index + 1, {**params, param.name: value})

    def narrowed(self, changes: Mapping[str, Any]) -> Space:
        """Return this space with some parameters overridden; parameters that can no longer exist are left out.

        A change is a fixed value, a list of choices, or a range `{low, high, log, step}` with optional parts. `width`
        applies to all of `width_0`, `width_1`, …, and in a choice of spaces `lr` to `mlp.lr`, `resnet.lr`, …; the more
        exact name wins.
        """
        chosen = overrides.matched(changes, [param.name for param in self.params])
        possible: dict[str, Param] = {}
        for declared in self.params:
            # Check overrides of parameters that cannot exist too: a mistake there is still a mistake.
            param = _changed(declared, changes[chosen[declared.name]]) if declared.name in chosen else declared
            decider = None if param.when is None else possible.get(param.when.name)
            if param.when is None or (decider is not None and param.when.possible(decider.distribution)):
                possible[param.name] = param
        return Space(tuple(possible.values()))


def _prefixed(param: Param, label: str, otherwise: Condition) -> Param:
    when = otherwise if param.when is None else replace(param.when, name=f"{label}.{param.when.name}")
    return replace(param, name=f"{label}.{param.name}", when=when)


def _changed(param: Param, change: Any) -> Param:
    return replace(param, distribution=overrides.applied(param.name, param.distribution, param.limits, change))


def _suggested(trial: Suggests, param: Param) -> Any:
    d = param.distribution
    if isinstance(d, CategoricalDistribution):
        return trial.suggest_categorical(param.name, d.choices)
    if isinstance(d, IntDistribution):
        return trial.suggest_int(param.name, d.low, d.high, step=d.step, log=d.log)
    assert isinstance(d, FloatDistribution)
    return trial.suggest_float(param.name, d.low, d.high, step=d.step, log=d.log)
