"""What it costs to hand a tensor to another process on this machine: affine in its bytes, measured once and kept.

Devices are processes, and a tensor goes from one to the other as a file on tmpfs: one writes it and says so, the other
reads it and says so. The time of that is fitted as seconds_per_byte · bytes + latency_seconds, as in Baechi (arXiv
2301.08695).
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

from hydra_tune.graph.placement.problem import Edge
from hydra_tune.measurements import keep, kept

FORMAT = 1
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
"""Bytes, from a small activation to a large one."""
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
    """The way between two processes."""

    seconds_per_byte: float
    latency_seconds: float

    def seconds(self, size: float) -> float:
        """How long a tensor of so many bytes takes."""
        return self.seconds_per_byte * size + self.latency_seconds

    def edges(self, edge_bytes: Mapping[Edge, float]) -> dict[Edge, float]:
        """What `place` takes as `edges`, from what it takes as `edge_bytes`."""
        return {edge: self.seconds(size) for edge, size in edge_bytes.items()}


def link(cache: Path, place: Path) -> Link:
    """The link of this machine, over files in `place`, from the directory `cache` where it has been measured before."""
    path = cache / f"link-{os.uname().nodename}.json"
    stored = kept(path)
    if stored is not None and stored.pop("format", None) == FORMAT and stored.pop("place", None) == str(place):
        try:
            return Link(**stored)
        except TypeError:
            pass  # of another form: it is measured again
    found = fit(measure(place))
    keep(path, {"format": FORMAT, "place": str(place), **asdict(found)})
    return found


def fit(samples: Sequence[tuple[float, float]]) -> Link:
    """The link that explains pairs of bytes and seconds best, neither of its numbers negative.

    Least squares of relative errors, or the largest sizes alone would decide, and the latency would be anything.
    """
    from scipy.optimize import nnls  # takes long to import, and links are measured once

    matrix = np.array([[size / seconds, 1 / seconds] for size, seconds in samples])
    (per_byte, latency), _ = nnls(matrix, np.ones(len(samples)))
    return Link(float(per_byte), float(latency))


def measure(place: Path, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> list[tuple[float, float]]:
    """Bytes and seconds of handing over tensors of these sizes: for each size the least, which nothing disturbed."""
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
