"""The display of a search on nodes: a row for each device, and for each node if there are many."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hydra_tune.coordinator.display import DeviceRow, LiveDisplay, PlainDisplay, TrialRow, place_of
from hydra_tune.coordinator.settings import SearchSettings


def drawn(display: LiveDisplay) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(display._draw())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def display() -> LiveDisplay:
    made = LiveDisplay(SearchSettings(trials=9), ())
    made.view.trials = {3: TrialRow(), 4: TrialRow()}
    return made


def test_few_devices_have_a_row_each(display: LiveDisplay) -> None:
    display.set_devices(["a/cpu:0", "b/cpu:0"])
    display.view.devices["b/cpu:0"] = DeviceRow(3, "train")
    lines = drawn(display).splitlines()
    assert next(line.split()[:3] for line in lines if line.startswith("b/cpu:0")) == ["b/cpu:0", "3", "train"]
    display.set_devices(["b/cpu:0", "c/cpu:0"])
    assert display.view.devices == {"b/cpu:0": DeviceRow(3, "train"), "c/cpu:0": DeviceRow()}


def test_many_devices_are_folded_into_a_row_for_each_node(display: LiveDisplay) -> None:
    display.set_devices([f"{node}/cpu:{i}" for node in "ab" for i in range(9)])
    display.view.devices["b/cpu:1"] = DeviceRow(3, "train")
    display.view.devices["b/cpu:2"] = DeviceRow(4, "")
    shown = drawn(display)
    assert "cpu:" not in shown
    assert next(line.split() for line in shown.splitlines() if line.startswith("b ")) == [
        "b",
        "2",
        "trials",
        "1",
        "of",
        "9",
        "busy",
    ]


def test_a_search_says_where_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(SearchSettings(trials=9, study="s"), ())
    display.set_devices([f"{node}/cpu:{i}" for node in "ab" for i in range(9)])
    display.search_started(1, 0)
    assert "study s: 9 trials, on 18 devices of 2 nodes, in" in capsys.readouterr().err
    assert place_of({"cpu:0": DeviceRow(), "cpu:1": DeviceRow()}) == "cpu:0, cpu:1"
