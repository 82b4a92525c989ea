"""The device pool: parses `devices` and `device_memory`, and detects the devices of this machine.

A `Device` is what one worker has. By default that is one accelerator or an equal share of the cores; `cuda:0/2` makes
two of one accelerator, and `devices_per_trial` makes one of several.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Mapping
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
_ACCELERATOR = re.compile(r"([a-z]+):(\d+)(?:/(\d+))?")
_AUTO = re.compile(r"auto(?:/(\d+))?")
MOST_SLOTS = 32
DEVICES_HINT = "give auto, cpu, 2xcpu, or accelerators such as cuda:0,cuda:1; cuda:0/2 or auto/2 for two trials on each"
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""Variable that hides accelerators of a kind from a process."""


@dataclass(frozen=True)
class Device:
    """A compute device that runs units, with its memory budget in bytes and its share of the cores."""

    name: str
    torch_device: str
    """The device by torch's name in this process."""
    memory: int
    threads: int
    together: tuple[str, ...] = ()
    """All accelerators that the worker has, if it has several, by torch's names in this process."""
    count: int = 1
    """Number of devices that this one is made of."""

    @property
    def torch_devices(self) -> tuple[str, ...]:
        """The worker's devices by torch's names there: several are the only ones that it sees, from 0 on."""
        kind = self.torch_device.split(":")[0]
        return tuple(f"{kind}:{i}" for i in range(len(self.together))) or (self.torch_device,)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that show a worker its own accelerators only, if it has several."""
        if not self.together:
            return {}
        variable = VISIBLE[self.torch_device.split(":")[0]]
        ours = [each for each in os.environ.get(variable, "").split(",") if each]
        numbers = [int(name.split(":")[1]) for name in self.together]
        return {variable: ",".join(ours[number] if number < len(ours) else str(number) for number in numbers)}


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


def parse_devices(spec: str, device_memory: str | int | None = None, per_trial: int = 1) -> tuple[Device, ...]:
    """Return the devices that `spec` names, each with its memory budget; each is `per_trial` of them together."""
    found = _parse(spec, device_memory)
    if per_trial == 1:
        return found
    if len(found) % per_trial:
        raise SpecError(
            f"devices_per_trial cannot be {per_trial} with {len(found)} devices ({quoted(spec)})",
            "give a number that divides the number of devices",
        )
    if len({device.torch_device for device in found}) < len(found) and found[0].torch_device != "cpu":
        raise SpecError(
            f"devices {quoted(spec)} have several trials each, and devices_per_trial={per_trial} devices a trial",
            "give one or the other",
        )
    return tuple(_joined(found[start : start + per_trial]) for start in range(0, len(found), per_trial))


def _joined(some: tuple[Device, ...]) -> Device:
    """Return one device for a worker that has all of these."""
    first = some[0]
    kind = first.torch_device.split(":")[0]
    if first.torch_device != "cpu" and kind not in VISIBLE:
        known = ", ".join(VISIBLE)
        raise SpecError(f"devices_per_trial cannot be used with {quoted(kind)} devices", f"it can with {known} and cpu")
    return Device(
        "+".join(device.name for device in some), first.torch_device, sum(device.memory for device in some),
        sum(device.threads for device in some),
        () if first.torch_device == "cpu" else tuple(device.torch_device for device in some), len(some),
    )  # fmt: skip


def _parse(spec: str, device_memory: str | int | None) -> tuple[Device, ...]:
    if not isinstance(spec, str) or not spec.strip():
        raise SpecError(f"devices cannot be {quoted(spec)}", DEVICES_HINT)
    memory = None if device_memory is None else parse_memory(device_memory)
    text = spec.strip().lower()
    if match := _AUTO.fullmatch(text):
        found = _accelerators()
        if not found:  # a core is one trial's
            return _on_cpus(_automatic_cpu_count(), memory)
        return _on_accelerators(dict.fromkeys(found, _slots(spec, match[1])), memory)
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


def _on_accelerators(slots: Mapping[str, int], memory: int | None) -> tuple[Device, ...]:
    """Return a device for each slot of each accelerator, the first slots first, so that trials spread over them."""
    threads = max(1, cores() // sum(slots.values()))
    # Only a share of the free memory: the driver's context and kernel workspaces need some beside the tensors.
    free = {} if memory else probe.free_bytes(_backends())
    return tuple(
        Device(
            name if count == 1 else f"{name}-{slot + 1}", name,
            (memory or int(ACCELERATOR_SHARE * free[name])) // count, threads,
        )
        for slot in range(max(slots.values())) for name, count in slots.items() if slot < count
    )  # fmt: skip


def _backends() -> str:
    return os.environ.get("HYDRA_TUNE_BACKENDS", "")


def _slots(spec: str, text: str | None) -> int:
    count = int(text or 1)
    if not 1 <= count <= MOST_SLOTS:
        raise SpecError(f"devices cannot be {quoted(spec)}", f"give 1 to {MOST_SLOTS} trials for each device")
    return count


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


def _named_accelerators(spec: str, text: str) -> dict[str, int]:
    """Return the number of slots of each accelerator that is named."""
    matches = [_ACCELERATOR.fullmatch(name.strip()) for name in text.split(",")]
    if not all(matches):
        raise SpecError(f"devices cannot be {quoted(spec)}", DEVICES_HINT)
    named = [(f"{match[1]}:{match[2]}", _slots(spec, match[3])) for match in matches if match]
    names = [name for name, _ in named]
    found = _accelerators()
    for name in names:
        if name not in found:
            there = ", ".join(found) if found else "no accelerator"
            raise SpecError(f"device {quoted(name)} is not on this machine", f"there is {there}; cpu always works")
    if len(set(names)) < len(names):
        raise SpecError(f"devices {quoted(spec)} name one device twice", "name each device once")
    return dict(named)
