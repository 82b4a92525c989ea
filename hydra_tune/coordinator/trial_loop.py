"""The loop of a search: asks Optuna for trials, runs several at a time and announces their ends.

It reads from top to bottom in `TrialLoop.run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from hydra_tune.coordinator.attempts import Ended, TrialRunner
from hydra_tune.coordinator.display import Display
from hydra_tune.coordinator.failures import Errors, uncaught
from hydra_tune.coordinator.limits import Limits
from hydra_tune.coordinator.study import Asked
from hydra_tune.core.states import Outcome

logger = logging.getLogger(__name__)

STOP_SECONDS = 30.0
"""Seconds that an interrupted search waits for its trials to checkpoint; a second Ctrl-C does not wait."""


class TrialLoop:
    """Runs trials until the limits are reached or `stop` is set."""

    def __init__(
        self,
        runner: TrialRunner,
        limits: Limits,
        display: Display,
        stop: asyncio.Event,
        note: Callable[[Outcome], None],
        *,
        finished: int,
        catch: Errors | None = None,
    ) -> None:
        """`finished` trials have ended in earlier runs; `note` gets each outcome before it is on disk.

        Another error of user code than `catch` ends the search; None catches all.
        """
        self._catch = catch
        self.finished = finished
        """Number of trials of the study that have ended."""
        self.broken: Exception | None = None
        """The error that kept results from being stored."""
        self._runner = runner
        self._study = runner.study
        self._limits = limits
        self._display = display
        self._stop = stop
        self._note = note
        self._more = asyncio.Event()
        """Set when the limits are raised."""
        self._running: set[asyncio.Task[None]] = set()
        self._announcements: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Number of trials in flight."""
        return len(self._running)

    async def run(self, waiting: list[Asked], look: Callable[[], Awaitable[None]]) -> None:
        """Run the `waiting` trials, then new ones; `look` carries out requested actions."""
        running = self._running
        stopping = asyncio.create_task(self._stop.wait())
        more = asyncio.create_task(self._more.wait())
        self._limits.begin()
        try:
            while not self._stop.is_set():
                while self._limits.has_room(len(running), self._ended) and (waiting or self._may_ask()):
                    asked = waiting.pop(0) if waiting else await self._study.ask()
                    running.add(asyncio.create_task(self._run_trial(asked), name=f"trial {asked.number}"))
                if not running:
                    # Actions requested before the search began or at its last moment still count.
                    await look()
                    if not self._may_ask():
                        return
                    continue
                timeout = self._limits.look_again(self.finished, len(running))
                done, _ = await asyncio.wait(
                    {*running, stopping, more}, return_when=asyncio.FIRST_COMPLETED, timeout=timeout
                )
                if more in done:
                    self._more.clear()
                    more = asyncio.create_task(self._more.wait())
                for task in done & running:
                    task.result()
                    self.finished += 1
                running -= done
            # Candidates checkpoint and stop by themselves after their slice; an objective cannot be stopped.
            await asyncio.wait([stopping, *running], timeout=STOP_SECONDS)
        finally:
            stopping.cancel()
            more.cancel()

    def give_up(self, error: Exception) -> None:
        """End the search because of an error; what runs is checkpointed first."""
        self.broken = self.broken or error
        self._stop.set()

    def limits_raised(self) -> None:
        """Check again whether another trial may begin."""
        self._more.set()

    def cancel(self) -> set[asyncio.Task[None]]:
        """Cancel the trials in flight; return their tasks."""
        for task in self._running:
            task.cancel()
        return self._running

    async def announced(self) -> None:
        """Wait until the ends of all trials are announced."""
        await asyncio.gather(*self._announcements)

    @property
    def _ended(self) -> int:
        """Number of ended trials that count for the study's total."""
        return self.finished + self._limits.counted(self._study.elsewhere)

    def _may_ask(self) -> bool:
        return not self._study.ended_by_optuna and self._limits.may_ask(self._ended + len(self._running))

    async def _run_trial(self, asked: Asked) -> None:
        self._display.trial_started(asked.number)
        ended = await self._runner.run(asked)
        if ended is None:
            return
        self._note(ended.outcome)
        uncaught(asked.number, ended.outcome, self._catch)
        announcement = asyncio.create_task(self._announce(asked.number, ended))
        self._announcements.add(announcement)
        announcement.add_done_callback(self._announcements.discard)

    async def _announce(self, number: int, ended: Ended) -> None:
        """Report a trial's end once it is on disk; the next trial need not wait for it."""
        try:
            await self._study.on_disk()
        except Exception as error:  # noqa: BLE001 - raised at the end of the search
            # Results that cannot be stored are not worth computing.
            self.give_up(error)
            return
        outcome = ended.outcome
        logger.info("trial %d: %s%s", number, outcome.status, f" ({outcome.error})" if outcome.error else "")
        self._display.trial_ended(number, outcome)
        try:
            self._runner.tidy(number, ended)
        except (OSError, MemoryError) as error:  # its result is stored: files that stay are no reason to stop
            self._display.show(f"files of trial {number} could not be removed ({error})")
