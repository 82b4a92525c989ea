"""Measures how much cores slow each other down, and keeps other cores busy during a measurement.

Cores share caches, memory and clock rates, on a shared machine also with other users. A pipeline keeps all devices
busy, so its profiles are timed beside one process for each other device; times of a single busy core are too short by a
tenth to a quarter. Times compared across strategies are taken on one busy core and multiplied by one factor.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import numpy
import torch

from hydra_tune.core.devices import cores

logger = logging.getLogger(__name__)

TURNS = 7
SECONDS = 0.02
"""Seconds of work in a turn."""
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


@contextmanager
def company(others: int) -> Iterator[bool]:
    """Keep this many other cores busy during the block, as far as there are cores; yields True if they are.

    If no process can be started, the block runs alone: an optimistic prediction fails no trial.
    """
    with ExitStack() as stack:
        there = True
        try:
            begun = _others(stack, min(others, cores() - 1))
            for other in begun:
                other.begin()
        except OSError as error:
            logger.info("measuring without other busy cores (%s)", error)
            there = False
        yield there


def measured_crowding(devices: int, turns: int = TURNS) -> float:
    """Return the slowdown of a core while all work, the median over some turns; 1 for one device.

    With more devices than cores, devices take turns on the cores.
    """
    at_once = min(devices, cores())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            others = _others(stack, at_once - 1)
            _work()
            compared = [_compared(others) for _ in range(turns if others else 0)]
            return max(1.0, statistics.median(compared or [1.0])) * devices / at_once
    finally:
        torch.set_num_threads(threads)


def _others(stack: ExitStack, count: int) -> list[_Other]:
    """Start processes that wait for a command; they start concurrently."""
    others = [_Other(stack) for _ in range(count)]
    for other in others:
        other.answer()
    return others


class _Other:
    """A process that works on command, and ends with this one."""

    def __init__(self, stack: ExitStack) -> None:
        # Only numpy is on its path: a user's file named random.py would shadow Python's own module.
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(numpy.__file__).parents[1]),
        }  # fmt: skip
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", "-c", _OTHER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, bufsize=0,
            )
        )  # fmt: skip
        # Kill it first: leaving a `Popen` waits for its end.
        stack.callback(process.kill)
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
        """Wait until the process is ready, or has begun."""
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
    """Return the seconds of one round of matrix products and sums, as in training."""
    weights, moments, rows = torch.ones(SIDE, SIDE), torch.zeros(SIDE, SIDE), torch.ones(ROWS, SIDE)
    rounds, began = 0, time.perf_counter()
    while rounds < 2 or time.perf_counter() - began < SECONDS:
        torch.relu(rows @ weights)
        moments.mul_(0.9).add_(weights)
        rounds += 1
    return (time.perf_counter() - began) / rounds
