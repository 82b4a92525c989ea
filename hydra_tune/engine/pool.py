"""Worker processes of an engine: one per device and a builder, started when needed and replaced when lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from hydra_tune.core.devices import Device
from hydra_tune.core.errors import HydraTuneError
from hydra_tune.engine import messages
from hydra_tune.engine.jobs import Observer, WorkerState
from hydra_tune.engine.launch import worker_environment
from hydra_tune.engine.unit import Role
from hydra_tune.engine.worker_processes import Processes

logger = logging.getLogger(__name__)

WORKER_MODULES = ("hydra_tune.engine.worker", "hydra_tune.training.builds")
"""Modules that every worker needs; none of them imports torch."""
STILLBORN_LIMIT = 3
"""Consecutive workers of one device that may end before they are ready; then the pool gives up."""


class WorkerPool:
    """Starts and replaces workers; reports their messages and losses."""

    def __init__(
        self,
        devices: Sequence[Device],
        observer: Observer,
        *,
        directory: str,
        overflow: Sequence[str],
        python_path: Sequence[str],
        warm: Mapping[Role, Sequence[str]],
        on_message: Callable[[WorkerState, object], None],
        on_lost: Callable[[WorkerState, str], None],
        source: Callable[[Sequence[str]], Processes],
    ) -> None:
        """`source` makes the processes, given modules to import ahead.

        `on_lost` gets the lost worker and the reason, after its replacement was started.
        """
        self.devices = tuple(devices)
        self.workers: dict[int, WorkerState] = {}
        """Workers by id; an ended one stays until it is collected."""
        self.broken: HydraTuneError | None = None
        """Reason why no workers can be started."""
        self.closing = False
        self._observer = observer
        self._directory = directory
        self._overflow = tuple(overflow)
        self._python_path = (*python_path, *sys.path)
        self._warm = warm
        self._on_message = on_message
        self._on_lost = on_lost
        self._source = source
        self._ids = itertools.count()
        self._stillborn: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, expect: int) -> None:
        """Start the template, and workers for the first `expect` devices."""
        self._processes = self._source(self._imported_once())
        try:
            for device in self.devices[:expect]:
                self._start(Role.DEVICE, device)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all workers."""
        self.closing = True
        self._processes.abandon()
        for worker in self.workers.values():
            worker.process.kill()
        try:
            await asyncio.gather(*self._tasks)
        finally:
            self._processes.close()

    def of_role(self, role: Role) -> list[WorkerState]:
        """Return the workers of this role."""
        return [worker for worker in self.workers.values() if worker.role is role]

    def of_all_devices(self) -> tuple[int, ...]:
        """Return a worker id for each device, in device order; start missing workers."""
        self.start_devices(len(self.devices))
        found = {worker.device: worker.id for worker in self.of_role(Role.DEVICE)}
        return tuple(found[device] for device in self.devices)

    def start_devices(self, count: int) -> None:
        """Start workers for at most `count` of the devices that have none."""
        started = {worker.device for worker in self.of_role(Role.DEVICE)}
        for device in [device for device in self.devices if device not in started][: max(0, count)]:
            self._start(Role.DEVICE, device)

    def ensure_builder(self) -> None:
        """Start a builder unless one runs."""
        if not self.of_role(Role.BUILDER):
            self.start_builder()

    def start_builder(self) -> None:
        """Start one more builder; all go by the same name."""
        self._start(Role.BUILDER, Device("builder", "cpu", memory=0, threads=self.devices[0].threads))

    def warm_up(self, warm: Mapping[Role, Sequence[str]]) -> None:
        """Make workers that start from now on import these modules too."""
        self._warm = {**self._warm, **warm}
        self._processes.warm(self._imported_once())

    def in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task that `close` waits for."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _imported_once(self) -> list[str]:
        """Return the modules that the template imports for all workers."""
        return list(dict.fromkeys([*WORKER_MODULES, *itertools.chain(*self._warm.values())]))

    def _start(self, role: Role, device: Device) -> None:
        id = next(self._ids)
        setup = messages.Setup(
            worker=id, device=device.name, torch_device=device.torch_devices[0],
            torch_devices=device.torch_devices, memory=device.memory, threads=device.threads, directory=self._directory,
            overflow=self._overflow, sys_path=self._python_path, cwd=os.getcwd(),
            environment=worker_environment(device.threads) | device.environment, warm=tuple(self._warm.get(role, ())),
        )  # fmt: skip
        process = self._processes.make(
            setup,
            on_message=lambda message: self._on_message(worker, message),
            on_line=lambda line: self._observer.worker_line(device.name, line),
        )
        worker = WorkerState(id, role, device, process)
        self.workers[id] = worker
        process.start()
        self.in_background(self._watch(worker), f"watch {device.name}")

    async def _watch(self, worker: WorkerState) -> None:
        """Wait for a worker's end and start a replacement."""
        await worker.process.closed()
        # The worker stays listed until it is collected, so that no second one starts; units assigned meanwhile are
        # lost.
        how = await worker.process.reap()
        del self.workers[worker.id]
        reason = f"worker {worker.device.name} (pid {worker.process.pid}) {how}"
        if not self.closing:
            logger.info("%s", reason)
            self._observer.worker_lost(worker.device.name, reason)
            self._replace(worker, reason)
        self._on_lost(worker, reason)

    def _replace(self, worker: WorkerState, reason: str) -> None:
        name = worker.device.name
        self._stillborn[name] = 0 if worker.ready else self._stillborn.get(name, 0) + 1
        if self._stillborn[name] < STILLBORN_LIMIT:
            self._start(worker.role, worker.device)
            return
        tail = " | ".join(list(worker.process.tail)[-3:])
        self.broken = HydraTuneError(f"{reason} before it was ready, {STILLBORN_LIMIT} times; it last said: {tail}")
