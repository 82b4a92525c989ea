"""`doctor --devices` says whether a machine's devices do what strategies promise."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hydra_tune.coordinator import device_check
from hydra_tune.coordinator.device_check import check_devices
from tests.accelerator.process import needs_compiler

pytestmark = pytest.mark.slow


@pytest.fixture(params=["cpu", "testdev:0"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu":
        yield request.param
        return
    if "HYDRA_TUNE_ACCELERATOR" not in os.environ:
        pytest.skip("slow: set HYDRA_TUNE_ACCELERATOR=1")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HYDRA_TUNE_BACKENDS", "testdev=tests.accelerator.backend")
        environment.setenv("TESTDEV_DEVICES", "1")
        yield request.param


@needs_compiler
def test_a_device_that_does_what_it_should_is_ok(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":  # one exact strategy and one other are enough here: all have tests of their own
        monkeypatch.setattr(device_check, "EXACT", {"whole": "whole"})
        monkeypatch.setattr(device_check, "OTHERS", {})
    (verdict,) = check_devices()
    assert verdict.device == device
    assert set(verdict.strategies.values()) <= {"same", "trained"}, verdict.strategies
    assert verdict.ok
    if device != "cpu":
        assert verdict.measured["recovers"] is True
        assert verdict.measured["to_device_bytes_per_second"] > 0


@pytest.mark.parametrize("wrong", ["loss", "error"])
def test_a_device_that_gives_other_numbers_is_not(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra_tune.core.errors import SearchFailed

    class Record:
        def __init__(self) -> None:
            self.value, self.user_attrs = 1.0, {"recovers": True}

    def run(_device: str, _folder: str, build: object, strategy: object) -> Record:
        record = Record()
        if strategy == "shard":
            if wrong == "error":
                raise SearchFailed("no trial completed")
            record.value = 1.1
        return record

    monkeypatch.setattr(device_check, "_run", run)
    verdict = device_check._checked("cpu", ".")
    assert not verdict.ok
    assert verdict.strategies["whole"] == "same"
    assert verdict.strategies["shard"] == ("loss 1.1 instead of 1.0" if wrong == "loss" else "no trial completed")
