"""Parsing of `devices` and `device_memory`."""

from __future__ import annotations

import pytest

from hydra_tune.core.devices import cores, format_bytes, parse_devices, parse_memory
from hydra_tune.core.errors import SpecError

pytestmark = pytest.mark.smoke


def test_counted_cpus_share_cores_and_memory() -> None:
    two = parse_devices("2xcpu")
    one = parse_devices("cpu")
    assert [device.name for device in two] == ["cpu:0", "cpu:1"]
    assert two[0].threads == max(1, cores() // 2)
    assert two[0].memory == pytest.approx(one[0].memory / 2, rel=0.01)


def test_a_budget_holds_for_each_device() -> None:
    assert {device.memory for device in parse_devices("3xcpu", "96MiB")} == {96 * 2**20}


def test_auto_finds_something() -> None:
    assert parse_devices("auto")


@pytest.mark.parametrize(
    ("text", "size"), [("256MiB", 2**28), ("8GiB", 2**33), ("1.5GB", 1_500_000_000), ("12", 12), (12, 12)]
)
def test_memory_sizes(text: str | int, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["10XB", "-1GiB", "0", "", "GiB", "nan", True])
def test_wrong_memory_names_the_value_and_a_right_one(text: str) -> None:
    with pytest.raises(SpecError, match="256MiB"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["3xtpu", "", "0xcpu", "cpu:0,", "cuda", "xcpu", "-1xcpu", "999xcpu"])
def test_wrong_devices_name_the_value_and_the_legal_ones(text: str) -> None:
    with pytest.raises(SpecError, match="cpu"):
        parse_devices(text)


def test_an_absent_accelerator_is_named() -> None:
    with pytest.raises(SpecError, match="'cuda:77' is not on this machine"):
        parse_devices("cuda:77")


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1536, 2**30, 2**45)] == ["0 B", "1.5 KiB", "1.0 GiB", "32.0 TiB"]
