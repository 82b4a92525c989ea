"""The machine as a plan sees it: its devices, their memory, and how fast it computes and moves bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_tune.core.devices import Device


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The devices of a search and the memory behind them."""

    devices: int
    memory: int
    """Bytes of the smallest device."""
    host_bytes: int
    """Bytes of host memory that the search may use."""
    disk_bytes: int = 0
    """Bytes of disk to spill to when host memory is full."""
    cpu: bool = True
    """True if the devices are CPUs, so that device memory is host memory."""
    spare_cores: int = 0
    """Cores that no device computes on; copies made there cost no compute time."""

    @classmethod
    def of(cls, devices: Sequence[Device], *, host_bytes: int, disk_bytes: int, cores: int) -> Pool:
        """Return the pool of these devices."""
        cpu = devices[0].torch_device == "cpu"
        return cls(
            devices=len(devices), memory=min(device.memory for device in devices), host_bytes=host_bytes,
            disk_bytes=disk_bytes, cpu=cpu, spare_cores=max(0, cores - len(devices)) if cpu else cores,
        )  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """Speeds of this machine, as measured by `planner/calibration.py`."""

    compute: float = 50e9
    """Floating-point operations per second of one core, in a large matrix product."""
    copy: float = 5e9
    """Bytes per second from memory to memory."""
    host_read: float = 4e9
    """Bytes per second read from the spill store in host memory."""
    host_write: float = 3e9
    disk_read: float = 2e9
    disk_write: float = 1e9
    crowding: float = 1.0
    """Factor by which a core's work slows down while all other cores work too."""
