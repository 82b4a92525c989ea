"""Calls of trials that are answered on the event loop's thread: which, in which order, and not after the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from hydra_tune.coordinator.outage import Outage
from hydra_tune.coordinator.study import OwnedStudy
from hydra_tune.coordinator.study_thread import StudyThread
from hydra_tune.engine.unit import Role, Unit


class Recorder:
    """Stands for an OwnedStudy: notes on which thread each call was answered."""

    study_id, files, sampler = 1, None, None

    def __init__(self, sampler: Any, callbacks: tuple[Any, ...] = ()) -> None:
        self.settings = SimpleNamespace(trials=1, sampler=sampler, callbacks=callbacks)
        self.storage = SimpleNamespace(shared=False, pending=0)
        self.seen: list[tuple[str, bool]] = []
        self.held = threading.Event()
        self.held.set()

    def answer(self, number: int, attempt: str, name: str, args: tuple[Any, ...]) -> str:
        self.held.wait()
        self.seen.append((name, threading.current_thread() is threading.main_thread()))
        return name

    def ask(self) -> str:
        return self.answer(0, "", "ask", ())

    def flush(self) -> None: ...

    def look_outside(self) -> None: ...

    def close(self) -> None: ...


UNIT = Unit(trial=0, attempt="a", kind="build", work=print, args=(), role=Role.DEVICE)


def use(study: Recorder, work: Callable[[StudyThread], Any]) -> list[tuple[str, bool]]:
    async def run() -> None:
        thread = StudyThread(lambda: cast(OwnedStudy, study), Outage(1.0, print), on_broken=lambda error: None)
        async with thread:
            await work(thread)
        thread.answer(UNIT, "report", (), None)  # nobody answers any more

    asyncio.run(run())
    return study.seen


def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: Any, failure: object) -> None:
    loop.call_soon_threadsafe(future.set_result, value)


async def calls(thread: StudyThread) -> None:
    loop = asyncio.get_running_loop()
    for name in ("report", "suggest", "should_prune"):
        replied: asyncio.Future[Any] = loop.create_future()
        thread.answer(UNIT, name, (), partial(_settle, loop, replied))
        assert await replied == name
        await thread.on_disk()
    await thread.ask()


def test_a_sampler_that_does_not_learn_is_quick_and_a_pruner_never() -> None:
    assert use(Recorder("random"), calls) == [
        ("report", True),
        ("suggest", True),
        ("should_prune", False),
        ("ask", True),
    ]
    slow = [("report", True), ("suggest", False), ("should_prune", False), ("ask", False)]
    assert use(Recorder("tpe"), calls) == slow
    assert use(Recorder("random", callbacks=(print,)), calls) == slow


def test_calls_stay_in_order_and_wait_while_another_process_writes() -> None:
    study = Recorder("random")

    async def work(thread: StudyThread) -> None:
        study.held.clear()
        thread.answer(UNIT, "should_prune", (), None)
        thread.answer(UNIT, "report", (), None)  # quick, but not before the one that waits
        study.held.set()
        await thread.ask()
        study.storage.shared = True
        await thread.ask()

    seen = use(study, work)
    assert [name for name, _ in seen] == ["should_prune", "report", "ask", "ask"]
    assert [here for _, here in seen[:2]] == [False, False]
    assert seen[3] == ("ask", False)
