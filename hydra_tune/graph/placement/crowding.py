"""How much longer a core's work takes while the other devices' cores work too.

Cores share caches, memory and clock rates, on a shared machine with strangers as well. A pilot runs by itself, at least
for the first trial, and a pipeline keeps all devices at work, so what pilots show is too short by this factor. It is
measured once for a database's studies and kept: the work of this process is timed, in short turns, alone and beside one
process for each other device.
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

from hydra_tune.devices import cores
from hydra_tune.measurements import keep, kept

logger = logging.getLogger(__name__)

FORMAT = 1
TURNS = 7
SECONDS = 0.02
"""Of work in a turn."""
SIDE, ROWS = 768, 512
_BEGIN, _STOP = b"b", b"s"
_OTHER = f"""
import os, select
import numpy
weights, moments = numpy.ones(({SIDE}, {SIDE}), "float32"), numpy.zeros(({SIDE}, {SIDE}), "float32")
rows = numpy.ones(({ROWS}, {SIDE}), "float32")
os.write(1, b".")
while os.read(0, 1):
    os.write(1, b".")
    while not select.select([0], [], [], 0)[0]:
        numpy.maximum(rows @ weights, 0)
        moments *= 0.9
        moments += weights
    os.read(0, 1)
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
    """The median over some turns, each compared with the one before it; 1 for one device.

    More devices than cores take turns on these.
    """
    at_once = min(devices, cores())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            others = [_Other(stack) for _ in range(at_once - 1)]
            for other in others:
                other.answer()
            _work()
            compared = [_compared(others) for _ in range(turns if others else 0)]
            return max(1.0, statistics.median(compared or [1.0])) * devices / at_once
    finally:
        torch.set_num_threads(threads)


class _Other:
    """A process that works when it is told to, and ends with this one."""

    def __init__(self, stack: ExitStack) -> None:
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", "-c", _OTHER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, bufsize=0,
            )
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        self._told: IO[bytes] = process.stdin
        self._said: IO[bytes] = process.stdout

    def begin(self) -> None:
        self._told.write(_BEGIN)
        self.answer()

    def stop(self) -> None:
        self._told.write(_STOP)

    def answer(self) -> None:
        """Wait until it is ready, or has begun."""
        if not self._said.read(1):
            raise OSError("a process that measures how cores disturb each other has ended")


def _compared(others: list[_Other]) -> float:
    alone = _work()
    for other in others:
        other.begin()
    beside = _work()
    for other in others:
        other.stop()
    return beside / alone


def _work() -> float:
    """Seconds for a round of products and sums as in training."""
    weights, moments, rows = torch.ones(SIDE, SIDE), torch.zeros(SIDE, SIDE), torch.ones(ROWS, SIDE)
    rounds, began = 0, time.perf_counter()
    while rounds < 2 or time.perf_counter() - began < SECONDS:
        torch.relu(rows @ weights)
        moments.mul_(0.9).add_(weights)
        rounds += 1
    return (time.perf_counter() - began) / rounds
