"""The device pool: parses `devices` and `device_memory`, and detects the devices of this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from hydra_tune.core import probe
from hydra_tune.core.errors import SpecError, quoted

CPU_SHARE_OF_RAM = 0.8
ACCELERATOR_SHARE = 0.9
MOST_AUTOMATIC_CPU_DEVICES = 8
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?\s*", re.IGNORECASE)
_COUNTED_CPUS = re.compile(r"(?:(\d+)x)?cpu")
_ACCELERATOR = re.compile(r"([a-z]+):(\d+)")
DEVICES_HINT = "give auto, cpu, 2xcpu, or accelerators such as cuda:0,cuda:1"


@dataclass(frozen=True)
class Device:
    """A compute device that runs units, with its memory budget in bytes and its share of the cores."""

    name: str
    torch_device: str
    memory: int
    threads: int


def parse_memory(text: str | int) -> int:
    """Return the number of bytes in `256MiB`, `8GiB`, `1.5GB` or a plain number."""
    match = _MEMORY.fullmatch(str(text))
    if isinstance(text, bool) or match is None or not float(match[1]) > 0:
        raise SpecError(f"device_memory cannot be {quoted(text)}", "give a size such as 256MiB or 8GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "B").upper()])


def format_bytes(count: float) -> str:
    """Format a number of bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def parse_devices(spec: str, device_memory: str | int | None = None) -> tuple[Device, ...]:
    """Return the devices that `spec` names, each with its memory budget."""
    if not isinstance(spec, str) or not spec.strip():
        raise SpecError(f"devices cannot be {quoted(spec)}", DEVICES_HINT)
    memory = None if device_memory is None else parse_memory(device_memory)
    text = spec.strip().lower()
    if text == "auto":
        found = _accelerators()
        return _on_accelerators(found, memory) if found else _on_cpus(_automatic_cpu_count(), memory)
    match = _COUNTED_CPUS.fullmatch(text)
    if match:
        count = int(match[1] or 1)
        if not 1 <= count <= 256:
            raise SpecError(f"devices cannot be {quoted(spec)}", "give between 1xcpu and 256xcpu")
        return _on_cpus(count, memory)
    return _on_accelerators(_named_accelerators(spec, text), memory)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _automatic_cpu_count() -> int:
    # One device per core: two single-threaded processes train two small models at twice the speed of one process, while
    # a second thread on one small model gains next to nothing.
    return min(cores(), MOST_AUTOMATIC_CPU_DEVICES)


def _on_cpus(count: int, memory: int | None) -> tuple[Device, ...]:
    import psutil

    share = int(psutil.virtual_memory().total * CPU_SHARE_OF_RAM) // count
    threads = max(1, cores() // count)
    return tuple(Device(f"cpu:{i}", "cpu", memory or share, threads) for i in range(count))


def _on_accelerators(names: list[str], memory: int | None) -> tuple[Device, ...]:
    threads = max(1, cores() // len(names))
    # Only a share of the free memory: the driver's context and kernel workspaces need some beside the tensors.
    free = {} if memory else probe.free_bytes(_backends())
    return tuple(Device(n, n, memory or int(ACCELERATOR_SHARE * free[n]), threads) for n in names)


def _backends() -> str:
    return os.environ.get("HYDRA_TUNE_BACKENDS", "")


def _accelerators() -> list[str]:
    if _backends():
        return list(probe.names(_backends()))
    if not _torch_may_know_accelerators():
        return []
    from hydra_tune.core import accelerator

    return [str(device) for device in accelerator.available()]


def _torch_may_know_accelerators() -> bool:
    """True if torch's build may support accelerators, judged by its files: importing torch to ask takes a second."""
    if "torch" in sys.modules or sys.platform != "linux" or importlib.metadata.entry_points(group="torch.backends"):
        return True
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    build = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    return any(build.get(kind) is not None for kind in ("cuda", "hip", "xpu"))


def _named_accelerators(spec: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(_ACCELERATOR.fullmatch(name) for name in names):
        raise SpecError(f"devices cannot be {quoted(spec)}", DEVICES_HINT)
    found = _accelerators()
    for name in names:
        if name not in found:
            there = ", ".join(found) if found else "no accelerator"
            raise SpecError(f"device {quoted(name)} is not on this machine", f"there is {there}; cpu always works")
    if len(set(names)) < len(names):
        raise SpecError(f"devices {quoted(spec)} name one device twice", "name each device once")
    return names
