"""All that is specific to accelerators: one small module on `torch.accelerator`.

Only the CPU branches have been run by the project's tests; the others follow torch's documentation.
"""

from __future__ import annotations

import torch


def available() -> list[torch.device]:
    """The accelerators of this machine, in order; empty on a machine with CPUs only."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type == "cpu":
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def free_bytes(device: torch.device) -> int:
    """Free memory of an accelerator."""
    free, _total = torch.accelerator.get_memory_info(device)
    return int(free)


def use(device: torch.device) -> None:
    """Make `device` this process's default accelerator, as user code that says just "cuda" expects."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def begin_measuring(device: torch.device) -> None:
    """Forget the peak of earlier units."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """The most that tensors took on an accelerator since `begin_measuring`; None on a CPU, which keeps no count."""
    if device.type == "cpu":
        return None
    return int(torch.accelerator.max_memory_allocated(device))


def release_cached(device: torch.device) -> None:
    """Give memory that torch caches back to the device, so that other processes can have it."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
