"""The template: a process that has imported the workers' modules, from which workers are forked in milliseconds.

Started as `python -m hydra_tune.engine.template FD [PATH]`. FD is one end of a socket to the coordinator; with PATH,
other coordinators may connect there too, such as the searches of one test run. The template runs no user code, starts
no thread and touches no accelerator, so that a forked worker finds every library freshly imported. It refuses to fork
if an import has started a thread.

Requests and replies are JSON, one per packet: `hello` compares the two sides' environments; `import` loads modules;
`fork` starts a worker with the two descriptors sent along, its socket and its output; `collect` waits for an ended
worker. Workers are the template's children and lead their own process groups. When a coordinator is gone, its workers'
groups are killed; workers outlive the template.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

PACKET = 1 << 16
_PR_SET_PDEATHSIG = 1
READ_AT_START = (
    "CUDA", "GLIBC_", "GOMP_", "HIP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON",
    "PYTORCH", "THP_", "TORCH", "TZ",
)  # fmt: skip
"""Prefixes of environment variables that libraries read when loaded.

A template serves only coordinators with the same values.
"""

SET_BY_LIBRARIES = (
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
"""Variables that scikit-learn, Lightning and torch set in every process that imports them."""


class Refused(Exception):
    """The template cannot fork this worker."""


@dataclass
class Connection:
    """A coordinator, and the workers forked for it that are not yet collected."""

    line: socket.socket
    workers: set[int] = field(default_factory=set)
    served: bool = True
    """False for a coordinator with another environment, which starts its own template."""


@dataclass(frozen=True)
class Child:
    """Descriptors passed to a forked worker."""

    line: int
    output: int


def identity(environment: dict[str, str]) -> dict[str, Any]:
    """Return the inherited settings; a forked worker equals a new process only if both sides have the same."""
    # Thread counts differ per worker and are set again after the fork.
    own = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", *SET_BY_LIBRARIES)
    read = {name: value for name, value in environment.items() if name.startswith(READ_AT_START) and name not in own}
    return {
        "interpreter": [sys.prefix, sys.version], "package": __file__, "environment": read, "limits": _limits(),
        "cores": sorted(os.sched_getaffinity(0)), "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }  # fmt: skip


def _limits() -> dict[str, list[int]]:
    """Return the resource limits (`ulimit`) by name."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: list(resource.getrlimit(getattr(resource, name))) for name in names}


class Template:
    """Answers requests one after another, in a single thread."""

    def __init__(self, owner: socket.socket, path: str | None) -> None:
        self._identity = identity(dict(os.environ))
        self._owner = owner
        self._connections = {owner.fileno(): Connection(owner)}
        self._listener: socket.socket | None = None
        if path is not None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(path)
            self._listener.listen(64)

    def serve(self) -> Child | None:
        """Serve until the owner is gone; returns a Child in each forked worker, and None in the template."""
        while self._owner.fileno() in self._connections:
            waiting = [*self._connections, *([self._listener.fileno()] if self._listener else [])]
            for ready in select.select(waiting, [], [])[0]:
                if self._listener is not None and ready == self._listener.fileno():
                    line, _ = self._listener.accept()
                    self._connections[line.fileno()] = Connection(line)
                elif (child := self._serve(self._connections[ready])) is not None:
                    return child
        for connection in list(self._connections.values()):
            self._end(connection)
        return None

    def _serve(self, connection: Connection) -> Child | None:
        """Answer the next request of a coordinator."""
        try:
            data, descriptors = _receive(connection.line)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._end(connection)
            return None
        if not connection.served:
            _close(descriptors)
            return None
        request = json.loads(data)
        try:
            match request["do"]:
                case "hello" if differing := self._differing(request["identity"]):
                    connection.served = False
                    _say(connection.line, {"unlike": differing})
                case "import":
                    _import(request["modules"])
                    _say(connection.line, {"imported": request["modules"]})
                case "fork":
                    return self._fork(connection, request["id"], descriptors)
                case "collect":
                    _say(connection.line, self._collect(connection, request["pid"]))
        except Refused as error:
            _say(connection.line, {"refused": request["id"], "because": str(error)})
        return None

    def _differing(self, theirs: dict[str, Any]) -> str:
        """Return the names of the settings in which a coordinator differs from the template."""
        return ", ".join(name for name, value in self._identity.items() if theirs.get(name) != value)

    def _fork(self, connection: Connection, id: int, descriptors: list[int]) -> Child | None:
        """Fork a worker; return None in the template and a Child in the worker. Raises Refused."""
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            _close(descriptors)
            raise Refused(f"an import has started {threads - 1} threads, which a fork would lose")
        try:
            pid = os.fork()
        except OSError as error:
            _close(descriptors)
            raise Refused(f"the system cannot fork ({error})") from error
        if pid == 0:
            self._close_all()
            return Child(*descriptors)
        _close(descriptors)
        connection.workers.add(pid)
        _say(connection.line, {"forked": id, "pid": pid, "inherited_kib": _resident_kib()})
        return None

    def _collect(self, connection: Connection, pid: int) -> dict[str, Any]:
        connection.workers.discard(pid)
        _, status, usage = os.wait4(pid, 0)
        return {"collected": pid, "code": os.waitstatus_to_exitcode(status), "peak_kib": usage.ru_maxrss}

    def _end(self, connection: Connection) -> None:
        """Kill the workers of a coordinator that is gone, with their process groups.

        The socket is closed last: a coordinator that leaves waits for this.
        """
        del self._connections[connection.line.fileno()]
        for pid in connection.workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # the worker may not lead its group yet
                os.kill(pid, signal.SIGKILL)
        for pid in connection.workers:
            os.waitpid(pid, 0)
        connection.line.close()

    def _close_all(self) -> None:
        """Close the coordinators' sockets in a forked worker."""
        for connection in self._connections.values():
            connection.line.close()
        if self._listener is not None:
            self._listener.close()


def _import(modules: list[str]) -> None:
    _die_with_coordinator(True)  # an import takes seconds, in which a closed socket is not noticed
    for module in modules:
        # A failed import is reported by the unit that needs the module.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    _die_with_coordinator(False)  # from now on its workers are ended first
    # Workers share the pages of imported modules until one writes to them, as garbage collection would.
    gc.collect()
    gc.freeze()


def _die_with_coordinator(yes: bool) -> None:
    """Ask Linux to kill this process when its coordinator dies, or not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if yes else 0)


def _receive(line: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    data, ancillary, _, _ = line.recvmsg(PACKET, socket.CMSG_SPACE(2 * descriptors.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def _resident_kib() -> int:
    """Return this process's resident memory in KiB, which a fork starts with; the kernel's peak may be inherited."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


def name_process(name: str) -> None:
    """Set the name in `top` and `ps -o comm`; the template and its workers have the same command line."""
    with open("/proc/self/comm", "w") as file:
        file.write(name)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _say(line: socket.socket, reply: dict[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):  # the next read notices the closed socket
        line.send(json.dumps(reply).encode())


def main(owner: int, path: str | None) -> None:
    """Run the template; in each forked worker, run the worker."""
    name_process("hydra-template")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If the user's process ignores SIGCHLD, the kernel would collect our children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker = Template(socket.socket(fileno=owner), path).serve()
    if worker is not None:
        from hydra_tune.engine.worker import run_forked

        name_process("hydra-worker")
        run_forked(worker.line, worker.output)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
