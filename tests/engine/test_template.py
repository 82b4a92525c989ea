"""Workers forked from a template: equal to new interpreters, and replaced by those if there is no template."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from hydra_tune.core.errors import WorkerLost
from hydra_tune.engine import template_client
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.unit import Role
from hydra_tune.engine.worker import WorkerContext
from tests.engine.test_engine import engine, fill_memory, pid, recall, remember, unit
from tests.fault.searches import wait_for

# A search's own template, not the one that all tests share.
pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("own_template")]

WARM = {Role.DEVICE: ("torch",)}


def describe(context: WorkerContext) -> dict[str, Any]:
    """A worker's own view of what a process begins with."""
    return {
        "parent": os.getppid(),
        "leads": os.getpgid(0) == os.getsid(0) == os.getpid(),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "variables": dict(os.environ),
        "input": os.readlink("/proc/self/fd/0"),
        "descriptors": {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_open(n)},
        "arenas": os.environ["MALLOC_ARENA_MAX"],
        "modules": sorted(sys.modules),
    }


def _is_open(number: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{number}")


def threads_of_libraries(context: WorkerContext) -> dict[str, int]:
    import numpy as np
    import threadpoolctl
    import torch

    assert np.ones((2, 2)).sum() == 4
    pools = {pool["internal_api"]: pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
    return {"torch": torch.get_num_threads(), "openblas": pools["openblas"]}


def train_a_little(context: WorkerContext) -> float:
    """Products large enough for several threads, forward and backward, in torch and numpy."""
    import numpy as np
    import torch

    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = model(torch.ones(512, 512)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach()) + float((np.ones((512, 512)) @ np.ones((512, 512))).sum())


def random_numbers(context: WorkerContext) -> tuple[float, float]:
    import random

    import numpy as np

    return random.random(), float(np.random.random())


def fork_a_sleeper(context: WorkerContext) -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def template_of(running: Engine) -> int:
    found = running._pool._processes.launcher.pid
    assert found is not None
    return found


def test_a_forked_worker_begins_as_a_new_process_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[int, dict[str, Any], dict[str, Any]]:
        async with engine(tmp_path, devices=1, warm=WARM) as (running, _):
            await running.run(unit(pid))
            later.setenv("SET_LATER", "and seen by the next worker")
            later.chdir(tmp_path)
            os.kill((await running.run(unit(pid))).value, signal.SIGKILL)
            forked = await _until_answered(running, describe)
            template = template_of(running)
        later.setattr(template_client, "sys", _Elsewhere())
        async with engine(tmp_path, devices=1, warm=WARM) as (running, _):
            spawned = (await running.run(unit(describe))).value
        return template, forked, spawned

    with monkeypatch.context() as later:
        template, forked, spawned = asyncio.run(main())
    assert forked.pop("parent") == template
    assert spawned.pop("parent") == os.getpid()
    assert "torch" in forked["modules"]
    extra = set(forked.pop("modules")) - set(spawned.pop("modules"))
    assert not {name for name in extra if name.startswith("tests")}
    # Sockets and pipes have names of their own.
    kinds = [{name.split(":")[0] for name in each.pop("descriptors")} for each in (forked, spawned)]
    assert kinds[0] == kinds[1]
    assert forked == spawned
    assert forked["leads"]
    assert forked["variables"]["SET_LATER"]
    assert forked["folder"] == str(tmp_path)


class _Elsewhere:
    """The module sys of a system without a safe fork."""

    platform = "elsewhere"
    executable = sys.executable


async def _until_answered(running: Engine, work: Any) -> Any:
    """Run a unit on a worker that may just have been killed."""
    while True:
        try:
            return (await running.run(unit(work))).value
        except WorkerLost:
            continue


def test_libraries_have_the_workers_threads_and_not_the_templates(tmp_path: Path) -> None:
    async def main() -> tuple[dict[str, int], float]:
        async with engine(tmp_path, devices=1, threads=2, warm=WARM) as (running, _):
            threads = (await running.run(unit(threads_of_libraries))).value
            return threads, (await running.run(unit(train_a_little))).value

    threads, trained = asyncio.run(main())
    assert threads == {"torch": 2, "openblas": 2}
    assert trained > 512**3


def test_workers_do_not_draw_the_same_random_numbers(tmp_path: Path) -> None:
    async def main() -> list[tuple[float, float]]:
        async with engine(tmp_path, warm=WARM) as (running, _):
            both = await asyncio.gather(*(running.run(unit(random_numbers, trial=n)) for n in (1, 2)))
            return [each.value for each in both]

    ours, theirs = asyncio.run(main())
    assert ours[0] != theirs[0]
    assert ours[1] != theirs[1]


def test_no_torch_is_imported_where_nobody_asks_for_it(tmp_path: Path) -> None:
    async def main() -> dict[str, Any]:
        async with engine(tmp_path, devices=1) as (running, _):
            found: dict[str, Any] = (await running.run(unit(describe_modules))).value
            return found

    assert asyncio.run(main()) == {"torch": False, "numpy": True, "optuna": True}


def describe_modules(context: WorkerContext) -> dict[str, bool]:
    return {name: name in sys.modules for name in ("torch", "numpy", "optuna")}


def test_workers_outlive_a_template_that_dies_and_new_ones_come_from_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, record):
            first, worker = template_of(running), (await running.run(unit(remember, "a", 1))).value
            os.kill(first, signal.SIGKILL)
            while running._pool._processes.launcher.pid == first:
                await asyncio.sleep(0.01)
            assert (await running.run(unit(recall, "a"))).value == 1, "its worker is still there"
            # The one that could have said how it ended is gone; all else is as ever.
            sleeper = (await running.run(unit(fork_a_sleeper))).value
            os.kill(worker, signal.SIGKILL)
            replaced = await _until_answered(running, pid)
            assert replaced != worker
            assert psutil.Process(replaced).ppid() == template_of(running)
            assert not psutil.pid_exists(sleeper) or psutil.Process(sleeper).status() == psutil.STATUS_ZOMBIE
            assert ["nobody knows how" in reason for reason in record.lost] == [True]

    asyncio.run(main())


def test_a_stopped_template_is_replaced_and_outlives_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(template_client, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(template_client, "END_SECONDS", 0.2)

    async def main() -> list[psutil.Process]:
        async with engine(tmp_path, devices=1) as (running, _):
            first, worker = psutil.Process(template_of(running)), (await running.run(unit(pid))).value
            first.suspend()
            os.kill(worker, signal.SIGKILL)
            assert await _until_answered(running, pid) != worker
            second = psutil.Process(template_of(running))
            second.suspend()  # when the engine is left, its worker cannot be collected either
            return [first, second]

    assert not any(template.is_running() for template in asyncio.run(main()))
    assert "has not answered" in caplog.text


def test_a_worker_that_died_before_anybody_heard_of_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its template died too, and whoever collects orphans has: here the number is simply no process's any more."""
    lost: list[int] = []

    def open_gone(pid: int) -> int:
        if not lost:
            lost.append(pid)
            os.kill(pid, signal.SIGKILL)
            raise ProcessLookupError
        return opened(pid)

    opened = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", open_gone)

    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, record):
            assert await _until_answered(running, pid) not in lost
            assert len(record.lost) == 1

    asyncio.run(main())


FORKS_AT_THE_SECOND_TRY = """
import os, runpy, sys

fork, tries = os.fork, []

def fork_later():
    tries.append(1)
    if len(tries) == 1:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = fork_later
runpy.run_module("hydra_tune.engine.template", run_name="__main__", alter_sys=True)
"""


def test_a_fork_that_fails_concerns_its_worker_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if "hydra_tune.engine.template" in command:
            command = [command[0], "-c", FORKS_AT_THE_SECOND_TRY, *command[3:]]
        return started(command, **options)

    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)

    async def main() -> list[str]:
        async with engine(tmp_path, devices=2) as (running, record):
            await asyncio.gather(*(running.run(unit(describe, trial=n)) for n in range(6)))
            children = psutil.Process().children(recursive=True)
            workers = [worker.process.pid for worker in running._workers.values()]
            assert len(workers) == 2
            # Besides these two, the reaper and the template.
            assert len(set(workers) & {child.pid for child in children}) == 2
            assert len(children) - len(before) == 4
            return record.lost

    before = psutil.Process().children(recursive=True)
    assert asyncio.run(main()) == []


def test_the_users_path_is_the_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colorlog.py").write_text("here = True")

    async def main() -> bool:
        async with engine(tmp_path, devices=1, warm={Role.DEVICE: ("colorlog",)}) as (running, _):
            return bool((await running.run(unit(has_own_colorlog))).value)

    with monkeypatch.context() as environment:
        environment.setenv("PYTHONPATH", str(tmp_path))
        assert asyncio.run(main())


def has_own_colorlog(context: WorkerContext) -> bool:
    return hasattr(sys.modules["colorlog"], "here")


def test_thread_counts_that_are_no_numbers_are_those_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> Any:
        async with engine(tmp_path, devices=1) as (running, _):
            return (await running.run(unit(threads_of_libraries))).value

    with monkeypatch.context() as environment:
        environment.setenv("OPENBLAS_NUM_THREADS", "auto")
        assert asyncio.run(main())["openblas"] == 1


def test_exit_codes_are_known_where_the_users_process_ignores_its_children(tmp_path: Path) -> None:
    async def main() -> list[str]:
        async with engine(tmp_path, devices=1) as (running, record):
            with pytest.raises(WorkerLost):
                await running.run(unit(leave))
            return record.lost

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert "exited with code 7" in asyncio.run(main())[0]
    finally:
        signal.signal(signal.SIGCHLD, before)


def leave(context: WorkerContext) -> None:
    os._exit(7)


def test_an_engine_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()

    async def main() -> None:
        async with engine(tmp_path, devices=1):
            pass

    with pytest.raises(FileNotFoundError):
        asyncio.run(main())


def test_the_kernels_word_on_a_killed_worker_is_passed_on(tmp_path: Path) -> None:
    async def main() -> str:
        async with engine(tmp_path, devices=1) as (running, record):
            with pytest.raises(WorkerLost):
                await running.run(unit(fill_memory, 2**29))
            return record.lost[0]

    assert "killed (signal 9), probably out of host memory: it had taken up to 5" in asyncio.run(main())


def test_where_an_import_starts_a_thread_workers_are_new_interpreters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """pandas imports pyarrow, whose allocator has a thread of its own: a forked worker would lack it."""
    caplog.set_level("INFO", "hydra_tune.engine.template_client")

    async def main() -> dict[str, Any]:
        async with engine(tmp_path, devices=1, warm={Role.DEVICE: ("pandas",)}) as (running, _):
            found: dict[str, Any] = (await running.run(unit(describe))).value
            return found

    assert asyncio.run(main())["parent"] == os.getpid()
    assert "an import has started 1 threads" in caplog.text


def test_a_template_that_cannot_run_costs_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str | None = None) -> Any:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        said = (tmp_path / "said").open("w+b")
        started.append(subprocess.Popen([sys.executable, "-c", "print('no such library')"], stdout=said))
        theirs.close()
        return ours, started[-1], said

    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(template_client, "start_template", broken)

    async def main() -> dict[str, Any]:
        async with engine(tmp_path, devices=1) as (running, _):
            found: dict[str, Any] = (await running.run(unit(describe))).value
            return found

    assert asyncio.run(main())["parent"] == os.getpid()
    assert len(started) == template_client.DEATHS


def test_an_engine_that_closes_at_once_waits_for_no_import(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))

    async def main() -> set[psutil.Process]:
        async with engine(tmp_path, warm={Role.DEVICE: ("torch._dynamo",)}) as (running, _):
            children = set(psutil.Process().children(recursive=True)) - before
            assert template_of(running) in {child.pid for child in children}
            return children

    assert not any(process.is_running() for process in asyncio.run(main()))


def test_engines_share_a_template_and_one_that_differs_starts_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "template")

    async def parent() -> int:
        async with engine(tmp_path / "run", devices=1) as (running, _):
            found: int = (await running.run(unit(describe))).value["parent"]
            return found

    (tmp_path / "run").mkdir()
    with monkeypatch.context() as environment:
        environment.setenv(template_client.SHARED, path)
        with template_client.shared_template(path, ("torch",)) as shared:
            assert asyncio.run(parent()) == asyncio.run(parent()) == shared.pid
            environment.setenv("MALLOC_ARENA_MAX", "3")  # read when a process starts, so another template's
            assert asyncio.run(parent()) not in (shared.pid, os.getpid())
            assert psutil.Process(shared.pid).children() == [], "the workers of ended engines are collected"
        assert asyncio.run(parent()) != shared.pid, "where it is gone, each has its own"


def test_an_engine_leaves_a_shared_template_when_the_workers_that_it_asked_for_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "template")

    async def leave_at_once() -> None:
        async with engine(tmp_path / "run", devices=8):
            pass

    (tmp_path / "run").mkdir()
    with monkeypatch.context() as environment, template_client.shared_template(path, ("torch",)) as shared:
        environment.setenv(template_client.SHARED, path)
        for _ in range(5):
            asyncio.run(leave_at_once())
            assert psutil.Process(shared.pid).children() == []


COORDINATOR = """
import asyncio, sys
from pathlib import Path
from tests.engine.test_engine import engine, unit
from tests.engine.test_template import fork_a_sleeper, template_of
from tests.engine.test_engine import pid

async def main():
    async with engine(Path(sys.argv[1]), devices=1) as (running, _):
        sleeper = (await running.run(unit(fork_a_sleeper))).value
        worker = (await running.run(unit(pid))).value
        print(template_of(running), worker, sleeper, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_nothing_outlives_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root},
    ) as coordinator:  # fmt: skip
        assert coordinator.stdout is not None
        processes = [psutil.Process(int(number)) for number in coordinator.stdout.readline().split()]
        assert len(processes) == 3
        coordinator.kill()
    psutil.wait_procs(processes)


IMPORTING = """
import asyncio, sys
from pathlib import Path
from hydra_tune.engine.unit import Role
from tests.engine.test_engine import engine
from tests.engine.test_template import template_of

async def main():
    async with engine(Path(sys.argv[1]), devices=1, warm={Role.DEVICE: ("slow_to_import",)}) as (running, _):
        print(template_of(running), running._pool._processes._reaper._process.pid, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_template_that_still_imports_ends_with_its_coordinator_even_without_a_reaper(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "slow_to_import.py").write_text(f"import time\nopen({str(begun)!r}, 'w')\ntime.sleep(600)")
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    environment = {name: value for name, value in os.environ.items() if name != template_client.SHARED}
    with subprocess.Popen(
        [sys.executable, "-c", IMPORTING, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, env={**environment, "PYTHONPATH": path},
    ) as coordinator:  # fmt: skip
        assert coordinator.stdout is not None
        template, reaper = (psutil.Process(int(number)) for number in coordinator.stdout.readline().split())
        wait_for(begun.exists, "the import")
        reaper.kill()
        coordinator.kill()
    assert psutil.wait_procs([template, reaper], timeout=60)[1] == []


def test_a_unit_that_comes_while_a_dead_worker_is_collected_waits_for_its_one_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with engine(tmp_path, devices=1) as (running, _):
            worker = (await running.run(unit(pid))).value
            collect = running._pool._processes.launcher.collect
            units: list[asyncio.Task[Any]] = []

            async def slowly(*of: Any) -> Any:
                units.append(asyncio.create_task(running.run(unit(pid))))
                await asyncio.sleep(0)  # the unit is handed out, or a worker is started for it
                return await collect(*of)

            monkeypatch.setattr(running._pool._processes.launcher, "collect", slowly)
            os.kill(worker, signal.SIGKILL)
            while not units:
                await asyncio.sleep(0.01)
            replaced = (await units[0]).value
            assert psutil.Process(template_of(running)).children() == [psutil.Process(replaced)]

    asyncio.run(main())
