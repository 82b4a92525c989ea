"""The cost of passing a tensor to another process on this machine: affine in its bytes, measured once and cached.

Devices are processes, and tensors pass between them as files on tmpfs: one writes and signals, the other reads and
signals. The time is fitted as seconds_per_byte · bytes + latency_seconds, as in Baechi (arXiv 2301.08695).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from hydra_tune.core.measurements import keep, kept
from hydra_tune.graph.placement.problem import Edge

FORMAT = 1
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
"""Sizes in bytes, from a small activation to a large one."""
REPEATS = 7
_READER = """
import sys
buffer = bytearray(int(sys.argv[1]))
for _ in sys.stdin:
    with open(sys.argv[2], "rb", buffering=0) as file:
        file.readinto(buffer)
    print(flush=True)
"""


@dataclass(frozen=True)
class Link:
    """The connection between two processes."""

    seconds_per_byte: float
    latency_seconds: float

    def seconds(self, size: float) -> float:
        """Return the seconds to pass a tensor of this many bytes."""
        return self.seconds_per_byte * size + self.latency_seconds

    def edges(self, edge_bytes: Mapping[Edge, float]) -> dict[Edge, float]:
        """Convert `edge_bytes` of `place` to its `edges`."""
        return {edge: self.seconds(size) for edge, size in edge_bytes.items()}


def link(cache: Path, place: Path) -> Link:
    """Return this machine's link over files in `place`, from the directory `cache` or measured now."""
    path = cache / f"link-{os.uname().nodename}.json"
    stored = kept(path)
    if stored is not None and stored.pop("format", None) == FORMAT and stored.pop("place", None) == str(place):
        try:
            return Link(**stored)
        except TypeError:
            pass  # another format: measure again
    found = fit(measure(place))
    keep(path, {"format": FORMAT, "place": str(place), **asdict(found)})
    return found


def fit(samples: Sequence[tuple[float, float]]) -> Link:
    """Return the link that best explains pairs of bytes and seconds, with non-negative numbers.

    Minimises relative errors; otherwise the largest sizes alone would decide, and the latency would be arbitrary.
    """
    from scipy.optimize import nnls  # slow to import, and links are measured once

    matrix = np.array([[size / seconds, 1 / seconds] for size, seconds in samples])
    (per_byte, latency), _ = nnls(matrix, np.ones(len(samples)))
    return Link(float(per_byte), float(latency))


def measure(place: Path, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> list[tuple[float, float]]:
    """Return bytes and least seconds of passing tensors of these sizes."""
    found = []
    with tempfile.TemporaryDirectory(dir=place, prefix="hydra-tune-link-") as folder:
        path = Path(folder) / "tensor"
        command = [sys.executable, "-I", "-S", "-c", _READER, str(max(sizes)), str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            for size in sizes:
                content = bytes(size)
                times = [_hand_over(path, content, reader.stdin, reader.stdout) for _ in range(repeats)]
                found.append((float(size), min(times)))
    return found


def _hand_over(path: Path, content: bytes, to_reader: IO[bytes], from_reader: IO[bytes]) -> float:
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        file.write(content)
    to_reader.write(b"\n")
    to_reader.flush()
    if not from_reader.readline():
        raise OSError(f"the process that reads {path} has ended")
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds
