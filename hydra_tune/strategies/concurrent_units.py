"""Await several units at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


class ConcurrentUnits:
    """A task group that raises the first failure itself, not an ExceptionGroup; the other tasks are cancelled."""

    async def __aenter__(self) -> ConcurrentUnits:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        return self

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        return self._group.create_task(work)

    async def __aexit__(self, *exc: Any) -> None:
        try:
            await self._group.__aexit__(*exc)
        except BaseExceptionGroup as group:
            raise _first(group) from None


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


async def all_of(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Await all coroutines concurrently; return their results in order."""
    async with ConcurrentUnits() as together:
        tasks = [together.start(each) for each in work]
    return [task.result() for task in tasks]
