"""What waits at a worker, and in which order it is taken."""

from __future__ import annotations

import threading

from hydra_tune.engine.inbox import Inbox
from hydra_tune.engine.messages import Drop, RunUnit


def run(unit: int, *order: float, attempt: str = "a") -> RunUnit:
    return RunUnit(unit, attempt, b"", order=order)


def taken(*messages: RunUnit | Drop) -> list[int | str]:
    inbox = Inbox()
    for message in messages:
        inbox.put(message)
    got = [inbox.get() for _ in messages]
    return [message.attempt if isinstance(message, Drop) else message.unit for message in got]


def test_units_without_an_order_are_taken_as_they_came() -> None:
    assert taken(run(3), run(1), run(2)) == [3, 1, 2]


def test_who_comes_later_and_goes_first_is_taken_before_those_that_wait() -> None:
    assert taken(run(0, 2, 10), run(1, 1, 11), run(2, -1, 12), run(3, 1, 13)) == [2, 1, 3, 0]


def test_what_is_to_be_freed_does_not_wait_for_units_of_others() -> None:
    assert taken(run(0, 5), run(1, 1), Drop("x"), run(2, 0), Drop("y")) == ["x", "y", 2, 1, 0]


def test_what_is_to_be_freed_waits_for_the_units_that_its_attempt_had_before() -> None:
    own = [run(0, 5, attempt="x"), run(1, 4, attempt="x")]
    assert taken(run(2, 0), *own, Drop("x"), run(3, 0, attempt="x"), run(4, 9)) == [1, 0, "x", 2, 3, 4]


def test_a_thread_that_waits_gets_what_comes() -> None:
    inbox, got = Inbox(), list[RunUnit | Drop]()
    reader = threading.Thread(target=lambda: got.append(inbox.get()))
    reader.start()
    inbox.put(run(7))
    reader.join(30)
    assert got == [run(7)]
