"""How fast this machine computes and moves bytes, measured once and kept in the user's cache directory.

`hydra-tune doctor --calibrate` measures anew. What a search then sees of its own trials corrects the plans that were
made with these rates.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from hydra_tune.graph.placement.crowding import measured_crowding
from hydra_tune.measurements import keep, kept
from hydra_tune.planning.pool import Rates

FORMAT = 2
SIDE = 768
"""Of the matrices whose product is timed."""
BYTES = 64 * 2**20
"""What is copied, written and read."""
REPEATS = 3


def cache_file() -> Path:
    """Where the rates of this machine are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hydra_tune" / f"rates-{platform.node() or 'machine'}.json"


def known_rates() -> Rates | None:
    """The rates that were measured before, where they can be read."""
    stored = kept(cache_file())
    if stored is None or stored.pop("format", None) != FORMAT or stored.pop("torch", None) != torch.__version__:
        return None
    try:
        found = Rates(**{name: float(value) for name, value in stored.items()})
    except (ValueError, TypeError):
        return None  # of another form: it is measured again
    return found if all(value > 0 for value in asdict(found).values()) else None


def keep_rates(rates: Rates) -> None:
    """Keep them for later searches; a machine whose cache cannot be written measures each time."""
    keep(cache_file(), {"format": FORMAT, "torch": torch.__version__, **asdict(rates)})


def calibrate(host: Path, disk: Path, devices: int = 1) -> Rates:
    """Measure and keep, with files in `host` (a tmpfs, where there is one) and on `disk`; about a second.

    With several devices, how they disturb each other is measured too, by processes of their own.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        host_read, host_write = _file_rates(host)
        disk_read, disk_write = _file_rates(disk)
        found = Rates(
            compute=_compute(), copy=_copy(), host_read=host_read, host_write=host_write, disk_read=disk_read,
            disk_write=disk_write, crowding=_crowding(devices),
        )  # fmt: skip
        keep_rates(found)
        return found
    finally:
        torch.set_num_threads(threads)


def _crowding(devices: int) -> float:
    try:
        return measured_crowding(devices)
    except OSError:  # no process can be started for it: the other rates are worth keeping all the same
        return 1.0


def _best(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the quickest of some runs: the one that nothing disturbed."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return max(min(found), 1e-9)


def _compute() -> float:
    one, other = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    one @ other
    return float(2 * SIDE**3 / _best(lambda: one @ other, 5))


def _copy() -> float:
    source = torch.ones(BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return BYTES / _best(lambda: target.copy_(source))


def _file_rates(place: Path) -> tuple[float, float]:
    """Bytes a second read and written; into pages that exist already, as a spilled block's do."""
    content = memoryview(bytearray(BYTES))
    with tempfile.NamedTemporaryFile(dir=place, prefix="hydra-tune-rates-", buffering=0) as file:
        descriptor = file.fileno()

        def write() -> None:
            done = 0
            while done < BYTES:
                done += os.pwrite(descriptor, content[done:], done)

        def read() -> None:
            done = 0
            while done < BYTES:
                done += os.preadv(descriptor, [content[done:]], done)

        write()
        return BYTES / _best(read), BYTES / _best(write)
