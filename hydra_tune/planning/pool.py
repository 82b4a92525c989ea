"""What a trial's plan depends on besides the trial: the devices, the memory behind them, and how fast bytes move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_tune.devices import Device


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The devices of a search, as a plan sees them."""

    devices: int
    memory: int
    """Bytes of the smallest one."""
    host_bytes: int
    """Host memory that the search may take."""
    disk_bytes: int = 0
    """Room for spilling where host memory ends."""
    cpu: bool = True
    """Whether devices are CPUs: what they hold is host memory then."""
    spare_cores: int = 0
    """Cores that no device computes on: there copies cost nothing."""

    @classmethod
    def of(cls, devices: Sequence[Device], *, host_bytes: int, disk_bytes: int, cores: int) -> Pool:
        """The pool of these devices."""
        cpu = devices[0].torch_device == "cpu"
        return cls(
            devices=len(devices), memory=min(device.memory for device in devices), host_bytes=host_bytes,
            disk_bytes=disk_bytes, cpu=cpu, spare_cores=max(0, cores - len(devices)) if cpu else cores,
        )  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """How fast this machine computes and moves bytes; `rates.py` measures them."""

    compute: float = 50e9
    """Floating-point operations a second of one core, in a large matrix product."""
    copy: float = 5e9
    """Bytes a second from memory to memory."""
    host_read: float = 4e9
    """Bytes a second from the spill store, where that is host memory."""
    host_write: float = 3e9
    disk_read: float = 2e9
    disk_write: float = 1e9
    crowding: float = 1.0
    """How much longer a core's work takes while all others work too."""
