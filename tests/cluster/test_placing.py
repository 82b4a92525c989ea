"""The choice of a trial's node, and the offset of a node's clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_tune.cluster.clock_offset import ClockOffset
from hydra_tune.cluster.placing import Place, Size, choose, rivals

SMALL, LARGE = Size(10, 20, 100), Size(40, 40, 100)


def test_the_least_loaded_node_comes_first_then_the_roomiest() -> None:
    assert choose([Place("a", SMALL, 2, 1), Place("b", SMALL, 4, 1)]) == "b"
    assert choose([Place("a", SMALL, 2, 1), Place("b", LARGE, 2, 1)]) == "b"
    assert choose([Place("b", SMALL, 2, 0), Place("a", SMALL, 2, 0)]) == "a"


def test_a_full_node_takes_none() -> None:
    assert choose([Place("a", SMALL, 2, 2)]) is None
    assert choose([]) is None


def test_a_trial_that_was_too_large_goes_to_larger_nodes_only() -> None:
    places = [Place("a", SMALL, 2, 0), Place("b", LARGE, 2, 1)]
    assert choose(places, SMALL) == "b"
    assert choose(places, LARGE) is None


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=20))
def test_any_choice_has_room(shape: list[tuple[int, int]]) -> None:
    places = [Place(f"n{i}", SMALL, at_once, running) for i, (at_once, running) in enumerate(shape)]
    name = choose(places)
    chosen = next((place for place in places if place.name == name), None)
    assert (chosen is None) == all(running >= at_once for at_once, running in shape)
    assert chosen is None or chosen.running < chosen.at_once


@pytest.mark.parametrize(
    ("running", "at_once", "to_come", "share", "expected"),
    [(1, 2, 100, 0.5, 2), (0, 3, 1, 0.5, 1), (2, 2, 0, 0.5, 2), (0, 2, 0, 1.0, 1)],
)
def test_rivals(running: int, at_once: int, to_come: int, share: float, expected: int) -> None:
    assert rivals(running, at_once, to_come, share) == expected


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1, max_size=20))
def test_the_offset_is_within_half_of_the_best_round_trip(ahead: float, trips: list[tuple[float, float]]) -> None:
    clock = ClockOffset()
    for i, (out, back) in enumerate(trips):
        sent = 1e6 + i
        clock.sample(sent, sent + out + ahead, sent + out + back)
    assert abs(clock.seconds - ahead) <= clock.error + 1e-6
