"""Checks every node of a Ray cluster for a search: versions, devices, way back to this machine, disk, shared files."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_tune.cluster.bridge import connect
from hydra_tune.cluster.node_devices import node_devices
from hydra_tune.cluster.versions import difference, versions
from hydra_tune.core.devices import format_bytes
from hydra_tune.core.errors import HydraTuneError

ANSWER_SECONDS = 60.0
"""Seconds that a node gets to answer."""
REACH_SECONDS = 5.0
LEAST_DISK = 2**30
"""Bytes of disk below which a node is not fit for a search."""


@dataclass(frozen=True)
class NodeState:
    """The state of one node."""

    name: str
    problems: tuple[str, ...]
    says: str
    """One line for people."""

    @property
    def ok(self) -> bool:
        return not self.problems


def examine_cluster(address: str) -> list[NodeState]:
    """Examine every node; raises HydraTuneError if the cluster cannot be reached."""
    try:
        ray = connect(address)
    except ImportError as error:
        raise HydraTuneError("a cluster needs Ray", "pip install 'hydra-tune[ray]' on every machine") from error
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise HydraTuneError(
            f"the Ray cluster {address!r} cannot be reached from this machine: {text}",
            "start Ray here with ray start --address=HEAD:6379",
        ) from error
    try:
        with _port(ray.util.get_node_ip_address()) as (host, port), _probe() as probe:
            return list(_examined(ray, host, port, probe))
    finally:
        ray.shutdown()


def _examined(ray: Any, host: str, port: int, probe: Path) -> Iterator[NodeState]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = []
    for node in ray.nodes():
        if node["Alive"]:
            cpus, gpus = int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
            memory = int(node["Resources"].get("memory", 0))
            call = ray.remote(examine).options(**options).remote(host, port, str(probe), cpus, gpus, memory)
            asked.append((f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})", cpus, gpus, call))
    for name, cpus, gpus, call in asked:
        try:
            yield state(name, cpus, gpus, ray.get(call, timeout=ANSWER_SECONDS))
        except Exception as error:  # whatever Ray raises for a node that cannot run a function
            text = " ".join(str(error).split())
            why = "hydra-tune is not installed there" if "No module named 'hydra_tune" in text else text[-300:]
            yield NodeState(name, (why,), f"{name}: NOT OK, {why}")


def state(name: str, cpus: int, gpus: int, found: dict[str, Any]) -> NodeState:
    """Return the state of a node from what was found there."""
    problems = []
    wrong = difference(found["versions"], versions())
    if wrong:
        problems.append(f"it has {wrong}: install this machine's versions there")
    if not cpus and not gpus:
        problems.append("Ray counts no CPU and no GPU there: start it with ray start --num-cpus")
    if found["unreachable"]:
        problems.append(f"it cannot reach this machine ({found['unreachable']}): open a port for it in the firewall, "
                        "and name that as HYDRA_TUNE_CLUSTER_PORT")  # fmt: skip
    if found["disk"] < LEAST_DISK:
        problems.append(f"only {format_bytes(found['disk'])} of disk are free in {found['folder']}")
    files = "sees this machine's files" if found["shared"] else "files are sent to it"
    facts = f"{', '.join(found['devices'])}; {format_bytes(found['disk'])} of disk free; {files}"
    return NodeState(
        name, tuple(problems), f"{name}: {'NOT OK, ' + '; '.join(problems) if problems else 'ok'}; {facts}"
    )


def examine(host: str, port: int, probe: str, cpus: int, gpus: int, memory: int) -> dict[str, Any]:
    """Return what a search needs to know of this node; runs there."""
    unreachable = ""
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError as error:
        unreachable = f"{host}:{port}, {error.strerror or error}"
    folder = tempfile.gettempdir()
    devices = node_devices("auto", None, cpus, gpus, memory)
    return {
        "versions": versions(), "unreachable": unreachable, "disk": shutil.disk_usage(folder).free, "folder": folder,
        "shared": os.path.exists(probe),
        "devices": [f"{device.name} {format_bytes(device.memory)}" for device in devices],
    }  # fmt: skip


@contextlib.contextmanager
def _port(host: str) -> Iterator[tuple[str, int]]:
    """Listen on a port of this machine, and close what connects."""
    with socket.create_server((host, int(os.environ.get("HYDRA_TUNE_CLUSTER_PORT", "0")))) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):  # the socket was closed: the end
                while True:
                    server.accept()[0].close()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield host, int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()


@contextlib.contextmanager
def _probe() -> Iterator[Path]:
    """Make a file in the current folder; a node that sees it shares the file system."""
    path = Path.cwd() / f".hydra-tune-probe-{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink()
