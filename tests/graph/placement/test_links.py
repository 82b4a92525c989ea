"""The cost of a transfer: fitted, measured between processes, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydra_tune.graph.placement import links
from hydra_tune.graph.placement.links import Link, fit, link, measure


def test_the_fit_finds_the_line_and_is_never_negative() -> None:
    true = Link(3e-10, 4e-5)
    found = fit([(size, true.seconds(size)) for size in links.SIZES])
    assert found.seconds_per_byte == pytest.approx(3e-10)
    assert found.latency_seconds == pytest.approx(4e-5)
    steep = fit([(1000, 1e-7), (2000, 3e-7), (4000, 9e-7)])
    assert steep.latency_seconds == 0
    assert steep.seconds_per_byte > 0
    assert true.edges({("a", "b"): 10**6}) == {("a", "b"): pytest.approx(3.4e-4)}


def test_it_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, cache = tmp_path / "a 'place'\nof files", tmp_path / "kept" / "here"
    place.mkdir()
    samples = measure(place, sizes=(1000, 2_000_000), repeats=3)
    assert [size for size, _ in samples] == [1000, 2_000_000]
    assert all(0 < seconds < 5 for _, seconds in samples)
    assert list(place.iterdir()) == []

    asked = []
    monkeypatch.setattr(links, "measure", lambda place: asked.append(place) or samples)
    first = link(cache, place)
    assert (link(cache, place), len(asked)) == (first, 1)
    link(cache, tmp_path)
    assert len(asked) == 2, "another place is another link"
    (kept,) = cache.iterdir()
    for broken in ("", "[]", '{"format": 1}', '{"format": 0}', "{"):
        kept.write_text(broken)
        assert link(cache, tmp_path) == first
    assert len(asked) == 7
