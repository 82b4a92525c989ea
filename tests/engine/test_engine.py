"""The engine with real worker processes: units, residency, turns, loss and clean-up."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import re
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from hydra_tune.core.devices import Device
from hydra_tune.core.errors import HydraTuneError, WorkerLost
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.scheduler import POLICIES
from hydra_tune.engine.unit import Memory, Role, Unit, UnitFailed, UnitHung, UnitResult
from hydra_tune.engine.worker import WorkerContext

# Work for the units; it travels by name, so it stands at module level.


def pid(context: WorkerContext) -> int:
    return os.getpid()


def remember(context: WorkerContext, attempt: str, value: Any) -> int:
    context.resident[attempt] = value
    return os.getpid()


def recall(context: WorkerContext, attempt: str) -> Any:
    return context.resident.get(attempt)


def fail(context: WorkerContext) -> None:
    raise KeyError("lr")


def leave(context: WorkerContext) -> None:
    raise SystemExit(7)


def unpicklable(context: WorkerContext) -> Any:
    return lambda: 0


def talk(context: WorkerContext) -> Any:
    print("hello from the unit")
    context.tell(context.unit, "note", 1)
    return context.ask(context.unit, "double", 21)


def ask_nonsense(context: WorkerContext) -> Any:
    return context.ask(context.unit, "nonsense")


def is_imported(context: WorkerContext, module: str) -> bool:
    return module in sys.modules


def import_now(context: WorkerContext, module: str) -> None:
    importlib.import_module(module)


def hold_everything(context: WorkerContext) -> None:
    """Hang so that no thread of the process can run, as a C extension may."""
    ctypes.PyDLL(None).sleep(60)


def wait_for(context: WorkerContext, path: str) -> int:
    """Wait for a file: an event that the test makes."""
    Path(path + ".started").touch()
    while not os.path.exists(path):
        time.sleep(0.001)
    return os.getpid()


def wait_and_ask(context: WorkerContext, path: str) -> None:
    """Wait for a file, and then until all that was sent here before has been read: the answer comes after it."""
    wait_for(context, path)
    context.ask(context.unit, "double", 1)


def fill_memory(context: WorkerContext, size: int) -> None:
    """Kill this process, as the kernel does when memory runs out."""
    taken = bytearray(os.urandom(2**20)) * (size >> 20)
    assert taken
    os.kill(os.getpid(), signal.SIGKILL)


class Record:
    """An observer that records its callbacks, and answers two calls."""

    def __init__(self) -> None:
        self.ended: list[tuple[Unit, UnitResult]] = []
        self.started: list[tuple[Unit, str]] = []
        self.lines: list[str] = []
        self.lost: list[str] = []
        self.notes: list[Any] = []
        self.late: list[Unit] = []

    def unit_started(self, unit: Unit, device: str) -> None:
        self.started.append((unit, device))

    def unit_ended(self, unit: Unit, result: UnitResult) -> None:
        self.ended.append((unit, result))

    def worker_line(self, device: str, line: str) -> None:
        self.lines.append(line)

    def worker_lost(self, device: str, reason: str) -> None:
        self.lost.append(reason)

    def late_result(self, unit: Unit, device: str) -> None:
        self.late.append(unit)

    def call(self, unit: Unit, name: str, args: tuple[Any, ...], reply: Callable[[Any, Any], None] | None) -> None:
        from hydra_tune.engine.unit import Failure

        if reply is None:
            self.notes.append((name, args))
        elif name == "double":
            reply(args[0] * 2, None)
        else:
            reply(None, Failure("ValueError", f"a trial has no {name!r}", ""))


@asynccontextmanager
async def engine(
    directory: Path, devices: int = 2, threads: int = 1, **options: Any
) -> AsyncIterator[tuple[Engine, Record]]:
    record = Record()
    pool = [Device(f"cpu:{i}", "cpu", 2**30, threads) for i in range(devices)]
    async with Engine(pool, record, directory=str(directory), **options) as running:
        yield running, record


def unit(work: Callable[..., Any], *args: Any, trial: int = 0, **options: Any) -> Unit:
    return Unit(trial=trial, attempt=f"a{trial}", kind="test", work=work, args=args, **options)


def test_units_run_in_worker_processes_and_state_stays_where_it_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(tmp_path) as (running, record):
            stored = await running.run(unit(remember, "a0", 42))
            assert stored.value != os.getpid()
            again = await running.run(unit(recall, "a0", worker=stored.worker))
            assert again.value == 42
            assert again.device == stored.device
            running.drop("a0")
            assert (await running.run(unit(recall, "a0", worker=stored.worker))).value is None
            builder = await running.run(unit(pid, role=Role.BUILDER))
            assert builder.device == "builder"
            assert builder.value not in (stored.value, os.getpid())
            assert len(record.ended) == len(record.started) == 4

    asyncio.run(main())


def test_failures_come_back_where_the_unit_was_awaited(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, record):
            with pytest.raises(UnitFailed) as caught:
                await running.run(unit(fail))
            assert caught.value.failure.kind == "KeyError"
            assert "raise KeyError" in caught.value.failure.traceback
            with pytest.raises(UnitFailed, match=r"sys.exit\(7\)"):
                await running.run(unit(leave))
            with pytest.raises(UnitFailed, match="pickle"):
                await running.run(unit(unpicklable))
            assert (await running.run(unit(talk))).value == 42
            assert record.notes == [("note", (1,))]
            with pytest.raises(UnitFailed, match="a trial has no 'nonsense'"):
                await running.run(unit(ask_nonsense))
            assert len({result.worker for _, result in record.ended}) == 1, "no failure cost the worker"
        assert "hello from the unit" in record.lines

    asyncio.run(main())


def test_two_devices_run_two_units_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(tmp_path) as (running, _):
            gate = str(tmp_path / "gate")
            both = [asyncio.create_task(running.run(unit(wait_for, gate + str(i), trial=i))) for i in range(2)]
            # Each waits for a file that appears only once both have started.
            while not all(os.path.exists(f"{gate}{i}.started") for i in range(2)):
                await asyncio.sleep(0.01)
            for i in range(2):
                Path(gate + str(i)).touch()
            results = await asyncio.gather(*both)
            assert len({result.value for result in results}) == 2

    asyncio.run(main())


def test_a_second_builder_starts_where_a_unit_waits_for_the_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(tmp_path, builders=2) as (running, _):
            gate = str(tmp_path / "gate")
            both = [
                asyncio.create_task(running.run(unit(wait_for, gate + str(i), trial=i, role=Role.BUILDER)))
                for i in range(2)
            ]
            # Each waits for a file that appears only once both have started.
            while not all(os.path.exists(f"{gate}{i}.started") for i in range(2)):
                await asyncio.sleep(0.01)
            for i in range(2):
                Path(gate + str(i)).touch()
            one, other = await asyncio.gather(*both)
            assert one.worker != other.worker
            assert running.is_builder(one.worker)
            assert running.is_builder(other.worker)

    asyncio.run(main())


def test_a_killed_worker_loses_its_units_and_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, record):
            home = await running.run(unit(remember, "a0", 1))
            stuck = asyncio.create_task(running.run(unit(wait_for, str(tmp_path / "never"))))
            queued = asyncio.create_task(running.run(unit(pid, trial=1)))
            while not (tmp_path / "never.started").exists():
                await asyncio.sleep(0.01)
            os.kill(home.value, signal.SIGKILL)
            with pytest.raises(WorkerLost, match=r"was killed \(signal 9\), probably out of host memory: it had taken"):
                await stuck
            assert (await queued).value != home.value, "what had not started goes to the next worker"
            with pytest.raises(WorkerLost, match="is gone"):
                await running.run(unit(recall, "a0", worker=home.worker))
            fresh = await running.run(unit(pid))
            assert fresh.value != home.value
            assert len(record.lost) == 1

    asyncio.run(main())


def test_a_worker_that_ran_out_of_memory_is_reported_with_what_it_had_taken(tmp_path: Path) -> None:
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, _):
            with pytest.raises(WorkerLost, match=r"probably out of host memory: it had taken up to ") as caught:
                await running.run(unit(fill_memory, ours))
            number, scale = re.findall(r"up to ([\d.]+) ([MG])iB", str(caught.value))[0]
            assert float(number) * {"M": 2**20, "G": 2**30}[scale] > ours

    asyncio.run(main())


def test_a_cancelled_unit_frees_its_slot(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, _):
            gate = tmp_path / "gate"
            first = asyncio.create_task(running.run(unit(wait_for, str(gate))))
            while not gate.with_name("gate.started").exists():
                await asyncio.sleep(0.01)
            next_slot = asyncio.create_task(running.run(unit(fail, trial=1)))
            queued = asyncio.create_task(running.run(unit(fail, trial=2)))
            await asyncio.sleep(0)
            for task in (next_slot, queued):
                task.cancel()
            await asyncio.gather(next_slot, queued, return_exceptions=True)
            gate.touch()
            await first
            assert (await running.run(unit(pid, trial=3))).value > 0

    asyncio.run(main())


@pytest.mark.usefixtures("own_template")
def test_workers_do_not_outlive_an_engine(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    async def main() -> set[int]:
        async with engine(tmp_path) as (running, _):
            await running.run(unit(pid))
            return {child.pid for child in psutil.Process().children(recursive=True)} - before

    pids = asyncio.run(main())
    assert len(pids) == 4, "the reaper, the template and two workers"
    assert not [p for p in pids if psutil.pid_exists(p)]


def test_time_in_which_the_coordinator_did_not_run_is_no_sign_of_death(tmp_path: Path) -> None:
    """As for Ctrl-Z and `fg`: everything stands still for longer than the deadline, and then goes on."""

    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, _):
            first = await running.run(unit(pid, deadline=60))
            waits = asyncio.create_task(running.run(unit(wait_for, str(tmp_path / "gate"), deadline=1.0)))
            await asyncio.sleep(0.5)
            os.kill(first.value, signal.SIGSTOP)
            time.sleep(2.0)  # the event loop does not run either
            os.kill(first.value, signal.SIGCONT)
            await asyncio.sleep(0)
            (tmp_path / "gate").touch()
            assert (await waits).worker == first.worker
            # A pause is forgiven once: a worker that stays silent afterwards is hung.
            silent = asyncio.create_task(running.run(unit(wait_for, str(tmp_path / "never"), deadline=0.5)))
            await asyncio.sleep(0.2)
            time.sleep(1.0)
            with pytest.raises(UnitHung):
                await silent

    asyncio.run(main())


def test_a_hung_unit_is_ended_at_its_deadline_with_its_stacks(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, record):
            with pytest.raises(UnitHung, match=r"no sign of life for 0\.5 s") as caught:
                await running.run(unit(wait_for, str(tmp_path / "never"), deadline=0.5))
            assert "in wait_for" in caught.value.stacks
            assert (await running.run(unit(talk, deadline=60))).value == 42
            assert not record.late

    asyncio.run(main())


def test_a_stopped_worker_is_given_up_and_its_late_result_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, record):
            worker = (await running.run(unit(pid))).value
            gate = tmp_path / "gate"
            stuck = asyncio.create_task(running.run(unit(wait_for, str(gate), trial=5, deadline=1.0)))
            while not gate.with_name("gate.started").exists():
                await asyncio.sleep(0.01)
            os.kill(worker, signal.SIGSTOP)
            gate.touch()
            while not any(job.hung for w in running._workers.values() for job in w.jobs.values()):
                await asyncio.sleep(0.01)
            os.kill(worker, signal.SIGCONT)  # it finishes the unit, too late
            with pytest.raises(UnitHung):
                await stuck
            assert [late.trial for late in record.late] == [5]
            assert (await running.run(unit(pid))).value != worker

    asyncio.run(main())


@pytest.mark.parametrize("gang", [False, True])
def test_a_worker_that_is_stopped_while_idle_loses_the_units_it_is_given(tmp_path: Path, gang: bool) -> None:
    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, _):
            first = await running.run(unit(pid))
            os.kill(first.value, signal.SIGSTOP)
            units = [unit(pid, deadline=0.5, worker=first.worker if gang else None)]
            if gang:
                with pytest.raises(WorkerLost, match=r"it had not started a unit after 0\.5 s"):
                    await running.run_gang(units)
            else:
                assert (await running.run(units[0])).value != first.value

    asyncio.run(main())


@pytest.mark.usefixtures("own_template")
def test_a_worker_that_cannot_start_ends_the_engine_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")

    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, _):
            for _ in range(2):
                with pytest.raises(HydraTuneError, match="before it was ready, 3 times"):
                    await running.run(unit(pid))

    asyncio.run(main())


def test_what_cannot_be_imported_ahead_costs_the_unit_that_needs_it_and_no_worker(tmp_path: Path) -> None:
    """A worker that ended by it would be ready before that each time, and so be replaced for ever."""
    (tmp_path / "broken_ahead.py").write_text("raise RuntimeError('not on this machine')")
    (tmp_path / "sound_ahead.py").touch()
    options = {"python_path": [str(tmp_path)], "warm": {Role.BUILDER: ("broken_ahead", "missing", "sound_ahead")}}

    async def main() -> None:
        async with engine(tmp_path, expect=0, **options) as (running, record):
            first = asyncio.create_task(running.run(unit(is_imported, "sound_ahead", role=Role.BUILDER)))
            while not first.done() and not record.lost:
                await asyncio.sleep(0.01)
            assert not record.lost
            assert first.result().value is True, "the others are imported all the same"
            with pytest.raises(UnitFailed, match="not on this machine"):
                await running.run(unit(import_now, "broken_ahead", role=Role.BUILDER))
            assert not record.lost

    asyncio.run(main())


@pytest.mark.parametrize(("whole_remaining", "turns"), [(5.0, [0, 0, 1]), (120.0, [0, 1, 0])])
def test_who_lets_go_of_a_device_and_who_waited_for_it_are_chosen_from_alike(
    tmp_path: Path, whole_remaining: float, turns: list[int]
) -> None:
    """A sharded trial lets go at each commit, a moment before its next unit is there: it loses its turn to a whole one
    only where that has longer to go, not because that has waited."""
    in_shards, whole = Memory(2**20, spills=True), Memory(2**20, 2**19, alone=True)

    async def main() -> None:
        options = {"policy": POLICIES["lazy-lrtf"], "slots": 1}
        async with engine(tmp_path, devices=1, **options) as (running, record):

            async def sharded() -> None:
                for _ in range(2):
                    await running.run(unit(pid, trial=0, memory=in_shards, remaining=60.0))
                    running.let_go("a0")

            waits = running.run(unit(pid, trial=1, memory=whole, remaining=whole_remaining))
            await asyncio.gather(sharded(), waits)
            assert [begun.trial for begun, _ in record.started] == turns

    asyncio.run(main())


def test_units_in_stages_all_wait_at_their_worker_which_takes_the_least_rank_first(tmp_path: Path) -> None:
    async def main() -> None:
        options = {"policy": POLICIES["ranked"], "slots": 1}
        async with engine(tmp_path, devices=1, **options) as (running, record):
            there = (await running.run(unit(pid))).worker
            gate = tmp_path / "gate"

            def start(trial: int, rank: int | None, work: Callable[..., Any] = pid) -> asyncio.Task[UnitResult]:
                return asyncio.create_task(running.run(unit(work, trial=trial, worker=there, rank=rank and (rank, 0))))

            held = asyncio.create_task(running.run(unit(wait_and_ask, str(gate), worker=there)))
            while not gate.with_name("gate.started").exists():
                await asyncio.sleep(0.01)
            young = [start(1, 8), start(2, 7), start(3, 8, work=fail)]
            await asyncio.sleep(0)
            assert running.load("a9").waiting == 3
            assert not running._dispatch.waiting, "all of them are at the worker"
            older = [start(4, 6), start(5, None)]
            await asyncio.sleep(0)
            young.pop().cancel()
            await asyncio.sleep(0)
            gate.touch()
            await asyncio.gather(held, *young, *older)
            assert [begun.trial for begun, _ in record.started] == [0, 0, 5, 4, 2, 1]
            assert (await running.run(unit(recall, "a3", trial=3, worker=there))).value is None

    asyncio.run(main())


def test_a_worker_that_dies_takes_with_it_all_that_waited_there(tmp_path: Path) -> None:
    async def main() -> None:
        options = {"policy": POLICIES["ranked"], "slots": 1}
        async with engine(tmp_path, devices=1, **options) as (running, _):
            first = await running.run(unit(pid))
            waiting = [unit(wait_for, str(tmp_path / "gate"), worker=first.worker, rank=(0, 0))]
            waiting += [unit(pid, trial=trial, worker=first.worker, rank=(1, trial)) for trial in (1, 2, 3)]
            tasks = [asyncio.create_task(running.run(each)) for each in waiting]
            while not (tmp_path / "gate.started").exists():
                await asyncio.sleep(0.01)
            os.kill(first.value, signal.SIGKILL)
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(each) for each in ended] == [WorkerLost] * 4
            assert (await running.run(unit(pid))).value != first.value

    asyncio.run(main())


def test_many_units_that_wait_at_a_worker_that_hangs_do_not_hang_the_engine(tmp_path: Path) -> None:
    """A worker that holds the interpreter's lock reads nothing: what is sent to it must fit into its socket."""

    async def main() -> None:
        options = {"policy": POLICIES["ranked"], "slots": 1}
        async with engine(tmp_path, devices=1, **options) as (running, record):
            there = (await running.run(unit(pid))).worker
            hangs = asyncio.create_task(running.run(unit(hold_everything, worker=there, rank=(0, 0), deadline=3.0)))
            while len(record.started) < 2:
                await asyncio.sleep(0.01)
            large = [unit(recall, "x" * 10_000, trial=1, worker=there, rank=(1, 0)) for _ in range(60)]
            ended = await asyncio.gather(hangs, *map(running.run, large), return_exceptions=True)
            assert isinstance(ended[0], UnitHung)
            assert {type(each) for each in ended[1:]} <= {WorkerLost, UnitResult}

    asyncio.run(main())


def test_the_builder_serves_the_oldest_trial_first_whatever_came_while_it_was_busy(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, record):
            gate = str(tmp_path / "go")
            first = asyncio.create_task(running.run(unit(wait_for, gate, trial=5, role=Role.BUILDER)))
            while not record.started:
                await asyncio.sleep(0.01)
            builder = record_of_builder(running)
            later = asyncio.create_task(running.run(unit(pid, trial=6, role=Role.BUILDER)))
            await asyncio.sleep(0)
            older = asyncio.create_task(running.run(unit(pid, trial=0, role=Role.BUILDER)))
            await asyncio.sleep(0)
            assert running.is_busy(builder)
            Path(gate).touch()
            await asyncio.gather(first, later, older)
            assert [each.trial for each, _ in record.started] == [5, 0, 6]
            assert not running.is_busy(builder)
            assert not running.is_busy(99)

    asyncio.run(main())


def record_of_builder(running: Engine) -> int:
    (found,) = [worker.id for worker in running._workers.values() if worker.role is Role.BUILDER]
    return found


def parent(context: WorkerContext) -> int:
    return os.getppid()


def test_workers_of_all_tests_are_forked_from_one_template(tmp_path: Path) -> None:
    """Where a test module changes what libraries read when they are loaded, each search would start its own."""
    shared = os.environ["HYDRA_TUNE_TEMPLATE"]

    async def main() -> int:
        async with engine(tmp_path, devices=1) as (running, _):
            found: int = (await running.run(unit(parent))).value
            return found

    assert shared in psutil.Process(asyncio.run(main())).cmdline()
