"""Functions that Optuna's distributions lack: a value for a fraction, all values, membership.

Pure functions of a distribution. Nothing here draws random numbers.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TypeAlias

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

Value: TypeAlias = bool | int | float | str | None


def value_at(distribution: BaseDistribution, u: float) -> Value:
    """Return the value at the fraction `u` (0 to 1) of a distribution; a uniform `u` gives a uniform draw."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[_cell(u, len(distribution.choices))]
    if isinstance(distribution, IntDistribution):
        return _int_at(distribution, u)
    if isinstance(distribution, FloatDistribution):
        return _float_at(distribution, u)
    raise TypeError(f"not a distribution of Optuna: {distribution!r}")


def _int_at(d: IntDistribution, u: float) -> int:
    if not d.log:
        return d.low + d.step * _cell(u, _steps(d))
    # Half a step beyond both ends, as Optuna does, so that the end values get their full share.
    low, high = math.log(d.low - 0.5), math.log(d.high + 0.5)
    return min(max(round(math.exp(low + u * (high - low))), d.low), d.high)


def _float_at(d: FloatDistribution, u: float) -> float:
    if d.step is not None:
        return _stepped(d.low, d.step, _cell(u, _steps(d)))
    if d.log:
        low, high = math.log(d.low), math.log(d.high)
        return min(max(math.exp(low + u * (high - low)), d.low), d.high)
    return min(max(d.low + u * (d.high - d.low), d.low), d.high)


def _cell(u: float, cells: int) -> int:
    return min(int(u * cells), cells - 1)


def _steps(d: IntDistribution | FloatDistribution) -> int:
    """Return the number of values in a stepped range. Uses decimals: (0.3 - 0.1) / 0.1 is less than 2 in floats."""
    return _index(d.low, d.high, d.step or 1) + 1


def _index(low: float, value: float, step: float) -> int:
    return int((Decimal(str(value)) - Decimal(str(low))) / Decimal(str(step)))


def _stepped(low: float, step: float, index: int) -> float:
    """Return `low + index * step` in decimal: 0.3, not 0.30000000000000004."""
    return float(Decimal(str(low)) + index * Decimal(str(step)))


def last_step(low: float, high: float, step: float) -> float:
    """Return the largest `low + i * step` that is at most `high`."""
    return _stepped(low, step, _index(low, high, step))


def count(distribution: BaseDistribution) -> int | None:
    """Return the number of values of a distribution; None for a range of floats without a step."""
    if isinstance(distribution, CategoricalDistribution):
        return len(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return _steps(distribution)
    assert isinstance(distribution, FloatDistribution)
    if distribution.single():
        return 1
    return None if distribution.step is None else _steps(distribution)


def values(distribution: BaseDistribution) -> list[Value]:
    """Return all values of a distribution, in order. Only for those that `count` can count."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return list(range(distribution.low, distribution.high + 1, distribution.step))
    assert isinstance(distribution, FloatDistribution)
    if distribution.single():
        return [distribution.low]
    assert distribution.step is not None, "a range of floats without a step cannot be listed"
    return [_stepped(distribution.low, distribution.step, i) for i in range(_steps(distribution))]


def contains(distribution: BaseDistribution, value: Value) -> bool:
    """True if the distribution can yield `value`."""
    if isinstance(distribution, CategoricalDistribution):
        return any(value == choice and type(value) is type(choice) for choice in distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if not distribution.low <= value <= distribution.high:
        return False
    if distribution.step is None:
        return True
    steps = (value - distribution.low) / distribution.step
    return math.isclose(steps, round(steps), abs_tol=1e-8)


def highest(distribution: BaseDistribution) -> float:
    """Return the largest number of a distribution of numbers."""
    if isinstance(distribution, CategoricalDistribution):
        return max(choice for choice in distribution.choices if isinstance(choice, int | float))
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return distribution.high


def describe(distribution: BaseDistribution) -> str:
    """Describe a distribution in a few words, for messages and listings: `0.001 .. 0.1 (log)`, `relu | gelu`."""
    if isinstance(distribution, CategoricalDistribution):
        return " | ".join(str(choice) for choice in distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    if distribution.single():
        return f"{distribution.low:g}"
    text = f"{distribution.low:g} .. {distribution.high:g}"
    if distribution.log:
        return text + " (log)"
    coarse = distribution.step is not None and (isinstance(distribution, FloatDistribution) or distribution.step != 1)
    return text + f" (step {distribution.step:g})" if coarse else text
