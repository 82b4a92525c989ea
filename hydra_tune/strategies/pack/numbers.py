"""Numbers that differ from member to member, such as a dropout probability, in place of a float in a module or a loss.

The functions that know such numbers (`member_functions.py`) read `values`. Comparisons answer where all members agree;
anything else, arithmetic above all, refuses the pack rather than computing with one member's number.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import nn

from hydra_tune.strategies.pack.refusal import CannotPack
from hydra_tune.strategies.pack.signature import may_differ


class Varying:
    """A number of each member; not a float, so that torch refuses it where it is not expected."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = tuple(float(value) for value in values)

    def _all(self, test: Callable[[float], bool]) -> bool:
        answers = {test(value) for value in self.values}
        if len(answers) > 1:
            raise CannotPack("its code branches on a number that differs between trials")
        return answers.pop()

    def __lt__(self, other: float) -> bool:
        return self._all(lambda value: value < other)

    def __le__(self, other: float) -> bool:
        return self._all(lambda value: value <= other)

    def __gt__(self, other: float) -> bool:
        return self._all(lambda value: value > other)

    def __ge__(self, other: float) -> bool:
        return self._all(lambda value: value >= other)

    def __eq__(self, other: object) -> bool:
        return self._all(lambda value: value == other)

    def __bool__(self) -> bool:
        return self._all(bool)


def values_of(number: float | Varying, members: int) -> tuple[float, ...]:
    """Return the number of each member."""
    return number.values if isinstance(number, Varying) else (float(number),) * members


def set_numbers(template: nn.Module, models: Sequence[nn.Module]) -> None:
    """Put the members' numbers into the template; where all are equal, the number itself."""
    others = [dict(model.named_modules()) for model in models]
    for name, module in template.named_modules():
        for attribute, value in vars(others[0][name]).items():
            if may_differ(module, attribute, value):
                setattr(module, attribute, _one([getattr(modules[name], attribute) for modules in others]))


def loss_of(losses: Sequence[Callable[[Any, Any], Any]]) -> Callable[[Any, Any], Any]:
    """Return the loss for all members: the first one's, with the numbers of each."""
    first = losses[0]
    if first is F.cross_entropy:
        return lambda outputs, targets, **named: F.cross_entropy(outputs, targets, **named)  # as replaced in a pack
    if isinstance(first, functools.partial):
        named = {key: value for key, value in first.keywords.items() if key != "label_smoothing"}
        inner = loss_of([each.func for each in losses if isinstance(each, functools.partial)])
        if "label_smoothing" in first.keywords:
            values = [each.keywords["label_smoothing"] for each in losses if isinstance(each, functools.partial)]
            named["label_smoothing"] = _one(values)
        return functools.partial(inner, *first.args, **named)
    if isinstance(first, nn.Module):
        copied = copy.deepcopy(first)
        set_numbers(copied, [each for each in losses if isinstance(each, nn.Module)])
        return copied
    return first


def _one(values: Sequence[float]) -> float | Varying:
    return values[0] if all(value == values[0] for value in values) else Varying(values)
