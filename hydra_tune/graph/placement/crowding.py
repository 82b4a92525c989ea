"""How much longer a core's work takes while the other devices' cores work too.

Cores share caches, memory and clock rates, on a shared machine with strangers as well. Pilots run while the devices are
idle, and a pipeline keeps all of them at work, so what pilots show is too short by this factor. It is measured once a
study and kept: the work of this process is timed, in short turns, alone and beside one other process for each device.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import torch

from hydra_tune.measurements import keep, kept

logger = logging.getLogger(__name__)

FORMAT = 1
TURNS = 7
SECONDS = 0.02
"""Of work in a turn; the others work a little longer, so as to be at work all the while."""
SIDE = 768
_OTHER = """
import sys, time
import numpy
weights, moments = numpy.ones((768, 768), "float32"), numpy.zeros((768, 768), "float32")
rows = numpy.ones((512, 768), "float32")
print(flush=True)
for seconds in sys.stdin:
    end = time.perf_counter() + float(seconds)
    print(flush=True)
    while time.perf_counter() < end:
        numpy.maximum(rows @ weights, 0)
        moments *= 0.9
        moments += weights
    print(flush=True)
"""


def crowding(cache: Path, devices: int) -> float:
    """The factor for so many CPU devices, from the directory `cache` where it has been measured before."""
    path = cache / f"crowding-{os.uname().nodename}-{devices}.json"
    stored = kept(path)
    if stored is not None and stored.get("format") == FORMAT and isinstance(stored.get("factor"), float):
        return max(1.0, float(stored["factor"]))
    try:
        found = measured_crowding(devices)
    except OSError as error:
        logger.info("how cores disturb each other is not known (%s)", error)
        return 1.0
    keep(path, {"format": FORMAT, "factor": found})
    return found


def measured_crowding(devices: int, turns: int = TURNS) -> float:
    """The median over some turns, each compared with the one before it; 1 for one device."""
    if devices < 2:
        return 1.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            others = [_Other(stack) for _ in range(devices - 1)]
            _work()
            return max(1.0, statistics.median(_compared(others) for _ in range(turns)))
    finally:
        torch.set_num_threads(threads)


class _Other:
    """A process that works when it is told to, and ends with this one."""

    def __init__(self, stack: ExitStack) -> None:
        environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-I", "-c", _OTHER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._told: IO[bytes] = process.stdin
        self._said: IO[bytes] = process.stdout
        self.wait()

    def begin(self, seconds: float) -> None:
        self._told.write(f"{seconds}\n".encode())
        self._told.flush()
        self.wait()

    def wait(self) -> None:
        """Until it says that it has begun, or is done."""
        if not self._said.readline():
            raise OSError("a process that measures how cores disturb each other has ended")


def _compared(others: list[_Other]) -> float:
    alone = _work()
    for other in others:
        other.begin(2 * SECONDS)
    beside = _work()
    for other in others:
        other.wait()
    return beside / alone


def _work() -> float:
    """Seconds for a round of products and sums as in training."""
    weights, moments, rows = torch.ones(SIDE, SIDE), torch.zeros(SIDE, SIDE), torch.ones(512, SIDE)
    rounds, began = 0, time.perf_counter()
    while rounds < 2 or time.perf_counter() - began < SECONDS:
        torch.relu(rows @ weights)
        moments.mul_(0.9).add_(weights)
        rounds += 1
    return (time.perf_counter() - began) / rounds
