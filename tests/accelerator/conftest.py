"""The process with the test accelerator, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accelerator.process import DeviceProcess


@pytest.fixture(scope="session")
def device_process() -> Iterator[DeviceProcess]:
    process = DeviceProcess()
    yield process
    process.close()
