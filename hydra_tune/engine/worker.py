"""A worker process: it owns one device (or, as the builder, none), runs units and answers for its user code's calls.

Started as `python -m hydra_tune.engine.worker FD` with one end of a socket. The main thread runs units one after
another; a second thread reads messages, so that replies, withdrawals and the coordinator's death are seen while a unit
runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hydra_tune.engine.channel import Channel, Closed
from hydra_tune.engine.inbox import Inbox
from hydra_tune.engine.messages import (
    Alive,
    Call,
    Done,
    Drop,
    Ready,
    Reply,
    Run,
    Setup,
    Started,
    Withdraw,
    Withdrawn,
)
from hydra_tune.engine.unit import Failure, StepRecord, summed
from hydra_tune.errors import InputError

if TYPE_CHECKING:
    import torch

COORDINATOR_GONE = 3
_PR_SET_PDEATHSIG = 1


class BlockMemory(Protocol):
    """What of a device is given to blocks that can be spilled."""

    def limit(self, size: int) -> None:
        """Take at most so many bytes from here on."""
        ...


class RemoteError(Exception):
    """The coordinator answered a call with an error; its message is the coordinator's."""


class WorkerContext:
    """What the work of a unit may use: the device, what is resident, and the way to the coordinator."""

    def __init__(self, setup: Setup, channel: Channel) -> None:
        import torch

        self.setup = setup
        self.device: torch.device = torch.device(setup.torch_device)
        self.resident: dict[str, Any] = {}
        """State that outlives a unit, by attempt; dropped when the coordinator says so."""
        self.unit_peak_bytes: int | None = None
        """Set by work that counts its own tensors."""
        self.steps: list[StepRecord] = []
        """What the unit was made of, where the work says so."""
        self.unit = -1
        self.cache: dict[Any, Any] = {}
        """What all trials of this worker share, such as data sets."""
        self.blocks: BlockMemory | None = None
        """The device's block memory, once a trial has spilled."""
        self.block_limit: int | None = None
        """What that may take in the present unit, where the coordinator says so."""
        self._said_alive = 0.0
        self._channel = channel
        self._calls = itertools.count()
        self._replies: dict[int, queue.SimpleQueue[Reply]] = {}

    def send(self, message: object) -> None:
        self._channel.send(message)

    def alive(self) -> None:
        """Say that the unit which runs is getting on; at most once a second."""
        if time.monotonic() - self._said_alive > 1.0:
            self._said_alive = time.monotonic()
            self.send(Alive(self.unit))

    def limit_blocks(self, size: int | None) -> None:
        """Let the block memory take at most so many bytes; None where nobody knows what others hold."""
        self.block_limit = size
        if size is not None and self.blocks is not None:
            self.blocks.limit(max(0, size))

    def tell(self, unit: int, name: str, *args: Any) -> None:
        """Say something to the coordinator on behalf of a unit, without waiting."""
        self.send(Call(unit, None, name, args))

    def ask(self, unit: int, name: str, *args: Any) -> Any:
        """Ask the coordinator on behalf of a unit, and wait for the answer."""
        call = next(self._calls)
        answer: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._replies[call] = answer
        self.send(Call(unit, call, name, args))
        reply = answer.get()
        if reply.failure is not None:
            raise _as_exception(reply.failure)
        return reply.value

    def deliver(self, reply: Reply) -> None:
        self._replies.pop(reply.call).put(reply)


def _as_exception(failure: Failure) -> Exception:
    """An error of the coordinator's Optuna trial, with its own class where that is a built-in one."""
    kinds: dict[str, type[Exception]] = {
        "ValueError": ValueError, "TypeError": TypeError, "NotImplementedError": NotImplementedError
    }  # fmt: skip
    return kinds.get(failure.kind, RemoteError)(failure.message)


class Worker:
    """The two loops of a worker process."""

    def __init__(self, channel: Channel, context: WorkerContext) -> None:
        self.channel = channel
        self.context = context
        self.inbox = Inbox()
        self.withdrawn: set[int] = set()

    def read_messages(self) -> None:
        while True:
            try:
                message = self.channel.receive()
            except Closed:
                # The coordinator is gone, and with it every reason to go on; os._exit because the main thread may
                # be deep in user code.
                os._exit(COORDINATOR_GONE)
            match message:
                case Reply():
                    self.context.deliver(message)
                case Withdraw(unit):
                    self.withdrawn.add(unit)
                case _:
                    self.inbox.put(message)

    def run_units(self) -> None:
        while True:
            match self.inbox.get():
                case Drop(attempt):
                    self._drop(attempt)
                case Run() as run if run.unit in self.withdrawn:
                    self.withdrawn.discard(run.unit)
                    self.context.send(Withdrawn(run.unit))
                case Run() as run:
                    self._answer(self._run(run))
                    self.withdrawn.discard(run.unit)

    def _answer(self, done: Done) -> None:
        try:
            self.context.send(done)
        except Exception as error:  # noqa: BLE001 - a user's value that cannot travel is the unit's failure
            self.context.send(replace(done, value=None, failure=Failure.of(error)))

    def _run(self, run: Run) -> Done:
        from hydra_tune.engine import accelerator
        from hydra_tune.engine.gangs import Group

        context = self.context
        context.unit, context.unit_peak_bytes = run.unit, None
        group = Group(run.seat, context.device)
        context.send(Started(run.unit))
        accelerator.begin_measuring(context.device)
        started, clock = time.time(), time.perf_counter()
        value, failure = None, None
        try:
            context.limit_blocks(run.blocks)
            group.join()
            value = run.work(context, *run.args)
        except SystemExit as error:
            failure = Failure("SystemExit", f"user code called sys.exit({error.code!r})", "")
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is the unit's result
            failure = Failure.of(error)
        # Before the group is left: of a gang's failures the first one counts, the others follow from it.
        seconds = time.perf_counter() - clock
        group.leave()
        peak = accelerator.peak_bytes(context.device) or context.unit_peak_bytes
        steps, context.steps = summed(context.steps), []
        return Done(run.unit, value, failure, started, seconds, peak, steps)

    def _drop(self, attempt: str) -> None:
        from hydra_tune.engine import accelerator

        held = self.context.resident.pop(attempt, None)
        if held is not None:
            if hasattr(held, "close"):
                held.close()
            accelerator.release_cached(self.context.device)


def die_with_parent() -> None:
    """Ask Linux to kill this process when the coordinator dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def refuse_to_run_again(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: launchers such as Lightning's `ddp` start ranks by running the program of this process again.

    That would be another worker, without a coordinator, for which rank 0 would wait.
    """
    if event == "subprocess.Popen" and arguments[1][1:] == ["-m", "hydra_tune.engine.worker", *sys.argv[1:]]:
        raise InputError(
            "a worker of a search cannot be run again as a script, as strategy 'ddp' of Lightning does",
            "train with strategy='ddp_spawn' or with devices=1; 'ddp' is for scripts of their own",
        )


def main(fd: int) -> None:
    die_with_parent()
    sys.addaudithook(refuse_to_run_again)
    # Ctrl-C reaches the whole process group; what it means is the coordinator's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The watchdog asks a hung worker what it is doing; faulthandler answers even when Python code cannot run.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    line = socket.socket(fileno=fd)
    # A process that user code forks must not keep the line open when this one is gone.
    os.register_at_fork(after_in_child=line.close)
    channel = Channel(line)
    setup: Setup = channel.receive()
    sys.path[:] = setup.sys_path
    os.chdir(setup.cwd)

    import torch

    from hydra_tune.engine import accelerator

    torch.set_num_threads(setup.threads)
    context = WorkerContext(setup, channel)
    accelerator.use(context.device)
    worker = Worker(channel, context)
    threading.Thread(target=worker.read_messages, name="hydra-messages", daemon=True).start()
    context.send(Ready(os.getpid()))
    for module in setup.warm:
        # What cannot be imported is the failure of the unit that needs it.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    worker.run_units()


if __name__ == "__main__":
    main(int(sys.argv[1]))
