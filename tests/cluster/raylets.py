"""A Ray cluster of several raylets on this machine, started with `ray start` as users do, and ended by process id."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

import psutil

STORE_BYTES = 80_000_000
"""Bytes of each raylet's object store: the least that Ray takes, as nothing is kept there."""
START_SECONDS = 120


def ray(*arguments: str) -> str:
    """Run a command of Ray's; return what it prints."""
    # Workers of the nodes are forked from the template of the tests, which the environment names.
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, env=environment)
    if done.returncode:
        raise RuntimeError(f"ray {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


@dataclass
class Raylets:
    """A cluster with a head; `close` ends what is left of it."""

    # Short: the paths of Ray's sockets have at most 107 characters.
    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    raylets: list[psutil.Process] = field(default_factory=list)
    """The head's raylet first, then others in order of their start."""

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, cpus: int) -> None:
        """Start the head at first, then further nodes."""
        where = [f"--address={self.address}"] if self.raylets else ["--head", f"--port={self.port}",
                 f"--temp-dir={self.folder}", "--include-dashboard=false"]  # fmt: skip
        ray("start", *where, f"--num-cpus={cpus}", f"--object-store-memory={STORE_BYTES}",
            "--node-ip-address=127.0.0.1", "--disable-usage-stats")  # fmt: skip
        known = {raylet.pid for raylet in self.raylets}
        self.raylets += [each for each in self._ours("/raylet/raylet") if each.pid not in known]

    def drain(self, cpus: int) -> None:
        """Announce that the node with so many CPUs is about to be taken away."""
        found = subprocess.run(
            [sys.executable, "-c", _FIND, self.address, str(cpus)], capture_output=True, text=True, check=True
        )
        what = ["--address", self.address, "--node-id", found.stdout.split()[-1], "--deadline-remaining-seconds", "300"]
        why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "its machine is taken away"]
        ray("drain-node", *what, *why)

    def close(self) -> None:
        """End every process of this cluster, and wait for the ends of those that belong to them."""
        processes = self._ours("")
        everything = [*processes, *(child for each in processes for child in _children(each))]
        for process in everything:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(everything, timeout=30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ours(self, text: str) -> list[psutil.Process]:
        """Return the processes whose command names this cluster's folder, and this text, oldest first."""
        found = []
        for process in psutil.process_iter(["cmdline", "create_time"]):
            command = " ".join(process.info["cmdline"] or [])
            if f"{self.folder}/" in command and text in command.partition(" ")[0]:
                found.append(process)
        return sorted(found, key=lambda each: float(each.info["create_time"]))


_FIND = """
import logging, sys, ray
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
alive = [node for node in ray.nodes() if node["Alive"]]
print(next(node["NodeID"] for node in alive if node["Resources"].get("CPU") == int(sys.argv[2])))
"""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def bridges(address: str) -> list[psutil.Process]:
    """The bridges of searches on this cluster."""
    ours = ("hydra_tune.cluster.bridge", address)
    every = psutil.process_iter(["cmdline"])
    return [each for each in every if all(word in (each.info["cmdline"] or []) for word in ours)]


def agents_of(raylet: psutil.Process) -> list[psutil.Process]:
    """The agents that Ray has started on a node."""
    return [each for each in _children(raylet) if "hydra_tune.cluster.agent" in each.cmdline()]


def until(true: object, seconds: float = 60.0) -> None:
    """Wait until a function returns something true."""
    assert callable(true)
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)
