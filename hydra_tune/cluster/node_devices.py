"""The devices of one node: those that the search asks for, within what Ray gives to the agent."""

from __future__ import annotations

from dataclasses import replace

from hydra_tune.core.devices import MOST_AUTOMATIC_CPU_DEVICES, Device, parse_devices


def node_devices(
    spec: str, device_memory: str | int | None, cpus: int, gpus: int, memory: int = 0
) -> tuple[Device, ...]:
    """Return a node's devices; threads and the number of CPU devices follow from the `cpus` that Ray counts there.

    Ray's count may be smaller than the machine's: the others belong to someone else. So may its bytes of `memory`,
    which CPU devices share unless the search gives each a budget; 0 if Ray counts none.
    """
    automatic = spec.strip().lower() == "auto"
    if automatic and not gpus:
        spec = f"{max(1, min(cpus, MOST_AUTOMATIC_CPU_DEVICES))}xcpu"
    devices = parse_devices(spec, device_memory)
    threads = max(1, cpus // len(devices))
    share = memory // len(devices) if memory and device_memory is None else 0
    return tuple(
        replace(
            device,
            threads=min(device.threads, threads),
            memory=min(device.memory, share) if share and device.torch_device == "cpu" else device.memory,
        )
        for device in devices
    )
