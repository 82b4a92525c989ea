"""A worker process: owns one device (the builder none), runs units and handles calls of their user code.

A worker is forked from the template (`run_forked`), or started as `python -m hydra_tune.engine.worker FD`, with one end
of a socket. The main thread runs units one after another; a second thread reads messages, so that replies, withdrawals
and the coordinator's death are noticed while a unit runs. The first unit that needs torch imports it: a user's
objective may not need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import itertools
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hydra_tune.core.errors import InputError
from hydra_tune.engine.channel import Channel, Closed
from hydra_tune.engine.gangs import join_group, leave_group
from hydra_tune.engine.inbox import Inbox
from hydra_tune.engine.messages import (
    Alive,
    Call,
    Drop,
    Ready,
    RemoteError,
    Reply,
    RunUnit,
    Setup,
    Started,
    UnitDone,
    Withdraw,
    Withdrawn,
)
from hydra_tune.engine.unit import Failure, StepRecord, summed

if TYPE_CHECKING:
    import torch

COORDINATOR_GONE = 3
UNREADABLE = 4
_PR_SET_PDEATHSIG = 1


class BlockMemory(Protocol):
    """Device memory for blocks that can be spilled."""

    def limit(self, size: int) -> None:
        """Use at most `size` bytes from now on."""
        ...


class WorkerContext:
    """Context for the work of a unit: the device, resident state, and the channel to the coordinator."""

    def __init__(self, setup: Setup, channel: Channel) -> None:
        self.setup = setup
        self.resident: dict[str, Any] = {}
        """State that outlives a unit, by attempt; the coordinator orders its removal."""
        self.unit_peak_bytes: int | None = None
        """Peak bytes, set by work that counts its own tensors."""
        self.steps: list[StepRecord] = []
        """Steps of the unit, if the work records them."""
        self.unit = -1
        self.cache: dict[Any, Any] = {}
        """Objects shared by all trials of this worker, such as data sets."""
        self.blocks: BlockMemory | None = None
        """The device's block memory, once a trial has spilled."""
        self.block_limit: int | None = None
        """Bytes that the block memory may use in the current unit, if the coordinator set a limit."""
        self._said_alive = 0.0
        self._channel = channel
        self._calls = itertools.count()
        self._replies: dict[int, queue.SimpleQueue[Reply]] = {}

    @functools.cached_property
    def device(self) -> torch.device:
        """The device as a torch.device."""
        import torch

        return torch.device(self.setup.torch_device)

    @property
    def on_accelerator(self) -> bool:
        return self.setup.torch_device != "cpu"

    def send(self, message: object) -> None:
        self._channel.send(message)

    def alive(self) -> None:
        """Report that the running unit makes progress; at most once a second."""
        if time.monotonic() - self._said_alive > 1.0:
            self._said_alive = time.monotonic()
            self.send(Alive(self.unit))

    def limit_blocks(self, size: int | None) -> None:
        """Limit the block memory to `size` bytes; None if the memory of other attempts is unknown."""
        self.block_limit = size
        if size is not None and self.blocks is not None:
            self.blocks.limit(max(0, size))

    def tell(self, unit: int, name: str, *args: Any) -> None:
        """Send a call to the coordinator on behalf of a unit, without waiting."""
        self.send(Call(unit, None, name, args))

    def ask(self, unit: int, name: str, *args: Any) -> Any:
        """Send a call to the coordinator on behalf of a unit, and wait for the reply."""
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


_KINDS = (ValueError, TypeError, NotImplementedError, KeyError, RuntimeError, AttributeError)
"""Errors of the coordinator that keep their class in a worker, since user code may catch them."""


def _as_exception(failure: Failure) -> Exception:
    """Return the coordinator's error as an exception, with its own class if that is a known built-in."""
    for kind in _KINDS:
        if kind.__name__ == failure.kind:
            return kind(failure.message)
    return RemoteError(failure.message, failure.kind)


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
                # The coordinator is gone, so there is nothing left to do; os._exit because the main thread may be deep
                # in user code.
                os._exit(COORDINATOR_GONE)
            except Exception:  # whoever sent it would wait for ever: better the worker is lost, and says so
                traceback.print_exc()
                os._exit(UNREADABLE)
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
                case RunUnit() as run if run.unit in self.withdrawn:
                    self.withdrawn.discard(run.unit)
                    self.context.send(Withdrawn(run.unit))
                case RunUnit() as run:
                    self._answer(self._run(run))
                    self.withdrawn.discard(run.unit)

    def _answer(self, done: UnitDone) -> None:
        try:
            self.context.send(done)
        except Exception as error:  # a user's value that cannot travel is the unit's failure
            self.context.send(replace(done, value=None, failure=Failure.of(error)))

    def _run(self, run: RunUnit) -> UnitDone:
        context = self.context
        context.unit, context.unit_peak_bytes = run.unit, None
        context.send(Started(run.unit))
        if context.on_accelerator:
            from hydra_tune.core import accelerator

            accelerator.begin_measuring(context.device)
        started, clock = time.time(), time.perf_counter()
        value, failure = None, None
        try:
            context.limit_blocks(run.blocks)
            if run.seat is not None:
                join_group(run.seat, context.device)
            work, args = pickle.loads(run.call)
            value = work(context, *args)
        except SystemExit as error:
            failure = Failure("SystemExit", f"user code called sys.exit({error.code!r})", "")
        except BaseException as error:  # whatever user code raises is the unit's result
            failure = Failure.of(error)
        # Measured before leaving the group: the earliest failure of a gang is the original one.
        seconds = time.perf_counter() - clock
        if run.seat is not None:
            leave_group()
        peak = context.unit_peak_bytes
        if context.on_accelerator:
            peak = accelerator.peak_bytes(context.device) or peak
        steps, context.steps = summed(context.steps), []
        return UnitDone(run.unit, value, failure, started, seconds, peak, steps)

    def _drop(self, attempt: str) -> None:
        held = self.context.resident.pop(attempt, None)
        if held is not None:
            if hasattr(held, "close"):
                held.close()
            if self.context.on_accelerator:
                from hydra_tune.core import accelerator

                accelerator.release_cached(self.context.device)


def die_with_parent() -> None:
    """Ask Linux to kill this process when the coordinator dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def refuse_to_run_again(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that stops launchers such as Lightning's `ddp` from running this worker's program again.

    The copy would be a worker without a coordinator, for which rank 0 would wait. It is started without arguments, as
    user code sees none; a search within user code starts the same program with arguments.
    """
    if event == "subprocess.Popen" and arguments[1][1:] == ["-m", _program()]:
        raise InputError(
            "a worker of a search cannot be run again as a script, as strategy 'ddp' of Lightning does",
            "train with strategy='ddp_spawn' or with devices=1; 'ddp' is for scripts of their own",
        )


def _program() -> str:
    """Return the name of the module that this process was started with."""
    spec = sys.modules["__main__"].__spec__
    return "" if spec is None else spec.name


def run_forked(line: int, output: int) -> None:
    """Run a worker that was forked from the template as if it had been newly started."""
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all workers would share the template's random numbers
    main(line)


def main(fd: int) -> None:
    """Run the worker until the coordinator is gone."""
    # Arguments of this process are not those of the user's program, which may parse them when it is imported.
    del sys.argv[1:]
    sys.addaudithook(refuse_to_run_again)
    # Ctrl-C reaches the whole process group; the coordinator decides how to react.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The coordinator asks a hung worker for its stacks; faulthandler answers even when Python code cannot run.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    line = socket.socket(fileno=fd)
    # A process that user code forks must not keep the socket open after this one is gone.
    os.register_at_fork(after_in_child=line.close)
    channel = Channel(line)
    try:
        setup: Setup = channel.receive()
    except Closed:
        os._exit(COORDINATOR_GONE)
    _settle(setup)
    if "HYDRA_TUNE_CRASH_POINT" in os.environ:  # a test of crashes
        from hydra_tune.engine import crash_points

        crash_points.install(setup.device.replace(":", ""))
    context = WorkerContext(setup, channel)
    if context.on_accelerator:
        from hydra_tune.core import accelerator

        accelerator.use(context.device)
    worker = Worker(channel, context)
    threading.Thread(target=worker.read_messages, name="hydra-messages", daemon=True).start()
    for module in setup.warm:
        # A failed import is reported by the unit that needs the module.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    context.send(Ready(os.getpid()))
    worker.run_units()


def _settle(setup: Setup) -> None:
    """Apply the coordinator's path, folder and environment, and this worker's thread counts."""
    sys.path[:] = setup.sys_path
    os.chdir(setup.cwd)
    os.umask(os.umask(0o022) | 0o002)  # weights and checkpoints that anybody may change could not be trusted
    os.environ.clear()
    os.environ.update(setup.environment)
    # Libraries loaded by now have read the template's environment; later ones read the one above.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(setup.threads)
    wish = os.environ.get("OPENBLAS_NUM_THREADS", "").strip()
    blas = int(wish) if wish.isdecimal() else setup.threads
    if blas != 1:
        import threadpoolctl

        threadpoolctl.threadpool_limits(blas, user_api="blas")


if __name__ == "__main__":
    die_with_parent()
    main(int(sys.argv[1]))
