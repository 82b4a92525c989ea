"""Accelerator-specific code, in one small module on top of `torch.accelerator`.

The project's tests run it on the CPU and on a test accelerator of their own; see docs/accelerators.md.
"""

from __future__ import annotations

import importlib
import os

import torch

from hydra_tune.core.errors import SpecError, quoted

BACKENDS = "HYDRA_TUNE_BACKENDS"
"""Environment variable with modules to import for kinds of devices that torch does not know: kind=module,kind=module.

A package that registers itself as an entry point of `torch.backends` needs no entry here: torch imports it.
"""


def named_backends(text: str) -> dict[str, str]:
    """Return the module of each kind of device in the form of HYDRA_TUNE_BACKENDS."""
    found = {}
    for entry in filter(None, (each.strip() for each in text.split(","))):
        kind, separator, module = entry.partition("=")
        if not (separator and kind.strip().isalpha() and module.strip()):
            raise SpecError(f"{BACKENDS} cannot have {quoted(entry)}", "give kind=module, such as npu=torch_npu")
        found[kind.strip()] = module.strip()
    return found


def load_backend(kind: str, backends: str | None = None) -> None:
    """Import the module that registers this kind of device with torch, if the environment names one."""
    named = named_backends(os.environ.get(BACKENDS, "") if backends is None else backends)
    if kind in named:
        try:
            importlib.import_module(named[kind])
        except ImportError as error:
            raise SpecError(f"the backend of {kind} cannot be imported ({error})", f"correct {BACKENDS}") from error


def available() -> list[torch.device]:
    """Return the accelerators of this machine in index order; empty on a machine with CPUs only."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type == "cpu":
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def free_bytes(device: torch.device) -> int:
    """Return the free memory of an accelerator in bytes."""
    free, _total = torch.accelerator.get_memory_info(device)
    return int(free)


def use(device: torch.device) -> None:
    """Make `device` this process's default accelerator, so that user code that names just "cuda" gets it."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def begin_measuring(device: torch.device) -> None:
    """Reset the device's peak-memory counter."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak bytes of tensors on an accelerator since `begin_measuring`; None on a CPU."""
    if device.type == "cpu":
        return None
    return int(torch.accelerator.max_memory_allocated(device))


def release_cached(device: torch.device) -> None:
    """Return memory that torch caches to the device, so that other processes can allocate it."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
