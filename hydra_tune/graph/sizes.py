"""Sizes of tensors that record their origin, so that a program recorded with a few rows runs with any number.

A recorded size is an `int` for all code that is given one. Arithmetic with it is recorded, and so are decisions by it
(`if length > limit`), as checks that the recorded program repeats: a batch for which one comes out otherwise is refused
instead of computed wrongly. A use that has to have a plain number (`range(length)`) pins the size in the same way.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from hydra_tune.core.errors import CandidateError

_COMPARED = {
    "__eq__": operator.eq, "__ne__": operator.ne, "__lt__": operator.lt, "__le__": operator.le, "__gt__": operator.gt,
    "__ge__": operator.ge,
}  # fmt: skip
_COMPUTED = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "truediv": operator.truediv, "pow": operator.pow,
}  # fmt: skip
_MATH = ("sqrt", "log", "log2", "exp", "floor", "ceil", "pow")


class Records(Protocol):
    """The methods of a recorder that sizes call."""

    @property
    def recording(self) -> bool: ...

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Record a calculation with sizes, and return its result, a size or another number that records its origin."""

    def require(self, check: Callable[..., Any], *args: Any) -> None:
        """Record a check."""


class Size(int):
    """A whole number that depends on the sizes of a batch."""

    recorder: Records
    value: int
    """Number of the program's value that it is."""

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)


class Number(float):
    """A fraction that depends on the sizes of a batch, such as `1 / math.sqrt(length)`."""

    recorder: Records
    value: int

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __reduce__(self) -> Any:
        return float, (float.__float__(self),)


def sized(number: Any, recorder: Records, value: int) -> Any:
    """Return the number as one that records its origin; return anything else unchanged."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return number
    made: Any = Size(number) if isinstance(number, int) else Number(number)
    made.recorder, made.value = recorder, value
    return made


def plain(number: Any) -> Any:
    """Return the ordinary number that a recorded one is."""
    if isinstance(number, Size):
        return int.__int__(number)
    return float.__float__(number) if isinstance(number, Number) else number


def is_recorded(number: Any) -> bool:
    """True if this is a number of a recording that is under way."""
    return isinstance(number, Size | Number) and number.recorder.recording


def decided(compare: Callable[[Any, Any], bool], one: Any, other: Any, expected: bool) -> None:
    """Raise CandidateError if a decision by sizes has another result than when the model was recorded."""
    if bool(compare(one, other)) is not expected:
        raise CandidateError(
            f"a batch has other sizes than the recorded one, and the model's forward decides by sizes ({one} "
            f"{compare.__name__} {other})",
            "give batches of one size, or use --strategy whole",
        )


def pinned(size: Any, expected: Any) -> None:
    """Raise CandidateError if a value that the forward uses as a plain one differs from the recorded one."""
    if type(size) is not type(expected) or size != expected:
        raise CandidateError(
            f"a batch has {size!r} where the recorded one had {expected!r}, and the model's forward decides by sizes",
            "give batches of one size, or use --strategy whole",
        )


def counted(parts: Any, expected: int) -> None:
    """Raise CandidateError if an operation returns another number of tensors than when recorded."""
    pinned(len(parts), expected)


def pin(number: Any) -> None:
    """Note that the forward uses a recorded number as a plain one."""
    if is_recorded(number):
        number.recorder.require(pinned, number, plain(number))


def _compared(name: str, compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        found = getattr(type(plain(self)), name)(plain(self), plain(other))
        if found is NotImplemented and isinstance(other, int | float):
            found = compare(plain(self), plain(other))
        if found is not NotImplemented and is_recorded(self):
            self.recorder.require(decided, compare, self, other, found)
        return found

    return method


def _computed(function: Callable[..., Any], *, reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            pin(self)
            if hasattr(other, "__torch_function__"):
                return NotImplemented
            return _with_plain(function, self, other, reflected)
        args = (other, self) if reflected else (self, other)
        return self.recorder.compute(function, *args) if is_recorded(self) else function(*map(plain, args))

    return method


def _with_plain(function: Callable[..., Any], number: Any, other: Any, reflected: bool) -> Any:
    """Return the result for another operand than a number, such as the list in `[0] * length`."""
    args = (other, plain(number)) if reflected else (plain(number), other)
    return function(*args)


def _alone(name: str) -> Callable[[Any], Any]:
    function = getattr(operator, name)

    def method(self: Any) -> Any:
        return self.recorder.compute(function, self) if is_recorded(self) else function(plain(self))

    return method


def _plainly(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        pin(self)
        return getattr(plain(self), name)(*args)

    return method


def _equip(kind: Any) -> None:
    for name, compare in _COMPARED.items():
        setattr(kind, name, _compared(name, compare))
    for name, function in _COMPUTED.items():
        setattr(kind, f"__{name}__", _computed(function, reflected=False))
        setattr(kind, f"__r{name}__", _computed(function, reflected=True))
    for name in ("neg", "pos", "abs"):
        setattr(kind, f"__{name}__", _alone(name))
    for name in ("__bool__", "__int__", "__float__", "__floor__", "__ceil__", "__trunc__", "__round__", "__divmod__"):
        setattr(kind, name, _plainly(name))


_equip(Size)
_equip(Number)


class _RangeKind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _range)


_range = builtins.range


class _Range(metaclass=_RangeKind):
    """Stands for `range` during a recording: the number of its steps is a plain one."""

    def __new__(cls, *args: Any) -> Any:
        for each in args:
            pin(each)
        return _range(*map(plain, args))


@contextmanager
def sizes_recorded() -> Iterator[None]:
    """Let `range` and the functions of `math` see recorded sizes, within the block."""
    functions = {name: getattr(math, name) for name in _MATH}

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            recorded = [each for each in args if is_recorded(each)]
            return recorded[0].recorder.compute(function, *args) if recorded else function(*map(plain, args))

        return call

    builtins.range = _Range  # type: ignore[misc]
    for name, function in functions.items():
        setattr(math, name, recording(function))
    try:
        yield
    finally:
        builtins.range = _range  # type: ignore[misc]
        for name, function in functions.items():
            setattr(math, name, function)
