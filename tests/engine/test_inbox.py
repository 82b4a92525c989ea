"""What waits at a worker, and in which order it is taken."""

from __future__ import annotations

from hydra_tune.engine.inbox import Inbox
from hydra_tune.engine.messages import Drop, Run


def run(unit: int, *order: float) -> Run:
    return Run(unit, "a", print, (), order=order)


def taken(*messages: Run | Drop) -> list[int | str]:
    inbox = Inbox()
    for message in messages:
        inbox.put(message)
    got = [inbox.get() for _ in messages]
    return [message.attempt if isinstance(message, Drop) else message.unit for message in got]


def test_units_without_an_order_are_taken_as_they_came() -> None:
    assert taken(run(3), run(1), run(2)) == [3, 1, 2]


def test_who_comes_later_and_goes_first_is_taken_before_those_that_wait() -> None:
    assert taken(run(0, 2, 10), run(1, 1, 11), run(2, -1, 12), run(3, 1, 13)) == [2, 1, 3, 0]


def test_what_is_to_be_freed_is_freed_after_what_came_before_it_and_before_what_came_later() -> None:
    assert taken(run(0, 5), Drop("x"), run(1, 1), run(2, 0), Drop("y"), Drop("z")) == [0, "x", 2, 1, "y", "z"]
