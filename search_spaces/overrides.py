"""Overrides: a user's value or range for a declared parameter, checked and turned into a distribution.

    lr: 0.001                             a fixed value
    width: [64, 128]                      a list of choices
    lr: {low: 0.0001, high: 0.01}         a range; `log` and `step` as declared unless given

Each mistake is one line that names the override. A value must lie in the parameter's limits, or, where it has
none, in its declared range; so a learning rate may leave the range that is searched by default, but a dropout
of 1.5 is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.search_spaces import distributions
from hydra_tune.search_spaces.distributions import Value

RANGE_KEYS = ("low", "high", "log", "step")


def matched(changes: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return the override for each parameter: parameter name → key of the override."""
    if not isinstance(changes, Mapping):
        raise SpecError(f"overrides must map names to values, not {quoted(changes)}", "such as {lr: 0.001}")
    chosen: dict[str, str] = {}
    known: dict[str, None] = {}
    for name in names:
        answers_to = _answers_to(name)
        known.update(dict.fromkeys(answers_to))
        key = next((key for key in answers_to if key in changes), None)
        if key is not None:
            chosen[name] = key
    for key in changes:
        if key not in known:
            hint = nearest(str(key), {stem(name) for name in known})
            raise SpecError(f"override {quoted(key)} is no parameter of this space", hint)
    return chosen


def stem(name: str) -> str:
    """Return a parameter's name without its number: `mlp.width` for `mlp.width_0`."""
    return re.sub(r"_\d+$", "", name)


def _answers_to(name: str) -> list[str]:
    """Return the names that select a parameter, most exact first: mlp.width_0, width_0, mlp.width, width."""
    bare = name.rpartition(".")[2]
    return [name, bare, stem(name), stem(bare)]


def applied(name: str, declared: BaseDistribution, limits: tuple[float, float] | None, change: Any) -> BaseDistribution:
    """Return the declared distribution changed by an override."""
    if isinstance(change, Mapping):
        return _range(name, declared, limits, change)
    if isinstance(change, list | tuple):
        return _choices(name, declared, limits, change)
    return _fixed(declared, _value(name, declared, limits, change))


def _fixed(declared: BaseDistribution, value: Value) -> BaseDistribution:
    if isinstance(declared, IntDistribution) and isinstance(value, int):
        return IntDistribution(value, value)
    if isinstance(declared, FloatDistribution) and isinstance(value, float):
        return FloatDistribution(value, value)
    return CategoricalDistribution((value,))


def _choices(
    name: str, declared: BaseDistribution, limits: tuple[float, float] | None, change: Sequence[Any]
) -> BaseDistribution:
    if not change:
        raise SpecError(f"override {name!r} is an empty list", f"list values of {distributions.describe(declared)}")
    choices = [_value(name, declared, limits, each) for each in change]
    for position, choice in enumerate(choices):
        if choice in choices[:position]:
            raise SpecError(f"override {name!r} lists {choice!r} twice", "list each value once")
    return CategoricalDistribution(choices) if len(choices) > 1 else _fixed(declared, choices[0])


def _range(
    name: str, declared: BaseDistribution, limits: tuple[float, float] | None, change: Mapping[str, Any]
) -> BaseDistribution:
    for key in change:
        if key not in RANGE_KEYS:
            raise SpecError(f"override {name!r} has the unknown key {quoted(key)}", nearest(str(key), RANGE_KEYS))
    if isinstance(declared, CategoricalDistribution):
        raise SpecError(
            f"override {name!r} gives a range for a choice of {distributions.describe(declared)}",
            f"give one value or a list, such as {name}: [{', '.join(map(str, declared.choices[:2]))}]",
        )
    assert isinstance(declared, IntDistribution | FloatDistribution)
    low, high = (
        _value(name, declared, limits, change[key]) if key in change else getattr(declared, key)
        for key in ("low", "high")
    )
    if low > high:
        raise SpecError(f"override {name!r} has low {low:g} above high {high:g}", "give low <= high")
    log, step = _scale(name, declared, change)
    if log and low <= 0:
        raise SpecError(f"override {name!r} is a log range from {low:g}", "give a low above 0, or log: false")
    if step is not None:
        # Optuna lowers such a high with a warning; the user only asked for "up to".
        high = distributions.last_step(low, high, step)
    if isinstance(declared, IntDistribution):
        return IntDistribution(low, int(high), log=log, step=int(step or 1))
    return FloatDistribution(low, high, log=log, step=step)


def _scale(
    name: str, declared: IntDistribution | FloatDistribution, change: Mapping[str, Any]
) -> tuple[bool, float | None]:
    """Return `log` and `step` of a range; giving one of them drops the other's declared value."""
    log, step = change.get("log"), change.get("step")
    if log is not None and not isinstance(log, bool):
        raise SpecError(f"override {name!r} has log {quoted(log)}", "give true or false")
    if step is not None:
        step = _number(name, isinstance(declared, IntDistribution), step)
        if step <= 0:
            raise SpecError(f"override {name!r} has step {step:g}", "give a step above 0")
    if log and step is not None:
        raise SpecError(f"override {name!r} has both log and step", "give one of them")
    if log is None:
        log = declared.log and step is None
    if step is None and not log:
        step = declared.step
    return log, step


def _value(name: str, declared: BaseDistribution, limits: tuple[float, float] | None, given: Any) -> Any:
    """Return one value of an override, checked against the limits or else the declared range."""
    if isinstance(declared, CategoricalDistribution) and limits is None:
        if not distributions.contains(declared, given):
            hint = nearest(str(given), map(str, declared.choices))
            raise SpecError(f"override {name!r} cannot be {quoted(given)}", hint)
        return given
    value = _number(name, _is_whole(declared), given)
    low, high = limits if limits is not None else (getattr(declared, "low", 0), getattr(declared, "high", 0))
    if not low <= value <= high:
        raise SpecError(f"override {name!r} cannot be {value:g}", f"give a value from {low:g} to {high:g}")
    return value


def _is_whole(declared: BaseDistribution) -> bool:
    if isinstance(declared, CategoricalDistribution):
        return all(isinstance(choice, int) for choice in declared.choices)
    return isinstance(declared, IntDistribution)


def _number(name: str, whole: bool, given: Any) -> float:
    """Return a number of the parameter's type. Numeric text counts: YAML reads `1e-3` as text."""
    wanted = "a whole number" if whole else "a number"
    wrong = SpecError(f"override {name!r} cannot be {quoted(given)}", f"give {wanted}, a list of them, or a range")
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise wrong
    try:
        number = float(given)
    except (ValueError, OverflowError):
        raise wrong from None
    if not math.isfinite(number) or (whole and number != int(number)):
        raise wrong
    return int(given) if whole and isinstance(given, int) else (int(number) if whole else number)
