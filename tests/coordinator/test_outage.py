"""Outages of a database: pauses between attempts and the time limit, on a virtual clock."""

from __future__ import annotations

import pytest

from hydra_tune.coordinator.outage import LONGEST_PAUSE, Outage

pytestmark = pytest.mark.smoke


def test_attempts_become_rarer_and_end_with_the_patience() -> None:
    now, said = [100.0], list[str]()
    outage = Outage(60.0, said.append, clock=lambda: now[0])
    assert not outage.over
    pauses = []
    while not outage.over:
        outage.failed("connection refused")
        pauses.append(outage.pause)
        now[0] += outage.pause
    assert pauses[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE]
    assert now[0] == 160.0, "the last attempt is at the end of the patience"
    assert len(said) == 1
    assert "connection refused" in said[0]
    outage.failed("connection refused")
    assert outage.pause > 0, "no busy loop afterwards"


def test_the_end_of_an_outage_is_said_and_the_next_one_is_new() -> None:
    now, said = [0.0], list[str]()
    outage = Outage(10.0, said.append, clock=lambda: now[0])
    outage.ended()
    assert said == []
    outage.failed("terminated")
    now[0] = 9.0
    outage.ended()
    assert said[1:] == ["the database is back after 9.0 s; what waited is written"]
    now[0] = 12.0
    outage.failed("terminated")
    assert not outage.over
    assert outage.pause == 0.5
