"""One simulated search by its seed: what is drawn, how it runs, and what must hold of it."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from benchmarks.simulation.clock import Deadlock, TooLong, VirtualLoop, simulated_time
from benchmarks.simulation.training import Shape, expected
from benchmarks.simulation.workers import Faults, NoFaults, SimulatedProcesses, World
from hydra_tune.coordinator import retries, search_run, study_thread
from hydra_tune.coordinator.display import Display
from hydra_tune.coordinator.run_directories import run_directories
from hydra_tune.coordinator.search_run import Search
from hydra_tune.coordinator.settings import make_settings
from hydra_tune.coordinator.study import OwnedStudy
from hydra_tune.core.devices import parse_devices
from hydra_tune.core.errors import DatabaseAway, HydraTuneError
from hydra_tune.core.seeds import trial_seed
from hydra_tune.core.states import Outcome, Status
from hydra_tune.storage import leases, open_storage, queued_database
from hydra_tune.storage.queries import TrialRecord, trial_attempts, trial_records

SEED = 7
LIMIT = 3_000.0
"""Virtual seconds after which a search counts as endless; without faults it takes less than 60."""
BUDGETS = Counter(retries.RetryPolicy().budgets)
SELDOM = 20
"""One of so many looks for changes of other processes is made, as each takes longer than all else in between."""
RUNS = 6
"""Most times that a search which was interrupted is resumed."""


@dataclass(frozen=True)
class Schedule:
    """Everything that a seed decides before the search begins."""

    seed: int
    trials: int
    devices: int
    strategy: str
    pruner: str | None
    concurrency: int | None
    checkpoint_seconds: float
    shape: Shape
    faults: Faults
    interrupts: tuple[float, ...]
    """Seconds after which each run is interrupted, as by Ctrl-C."""
    away: tuple[tuple[float, float], ...]
    """Begin and end of the times in which the database cannot be written."""
    pauses: tuple[float, ...]
    """Times at which the coordinator does not run for ten minutes."""

    @classmethod
    def of(cls, seed: int) -> Schedule:
        chance = Random(seed)
        objective = chance.random() < 0.25
        pruner = "median" if chance.random() < 0.2 else None
        shape = Shape(
            epochs=chance.randint(1, 4), batches=chance.randint(1, 6), keep=chance.choice(("last", "best")),
            objective=objective, prunes=pruner is not None,
        )  # fmt: skip
        rate = chance.choice((0.0, 0.01, 0.03, 0.08))
        faults = Faults(
            dies=rate, hangs=rate * chance.random(), drops=rate * chance.random() / 2, stillborn=rate / 4,
            latency=chance.choice((1e-4, 1e-2, 0.2)), seconds=chance.choice((0.01, 0.3, 2.0)),
        )  # fmt: skip
        begins = [chance.uniform(0, 20) for _ in range(chance.choice((0, 0, 1, 2)))]
        return cls(
            seed=seed, trials=chance.randint(1, 8), devices=chance.randint(1, 4),
            strategy=chance.choice(("whole", "shard")), pruner=pruner, concurrency=chance.choice((None, None, 1, 2, 5)),
            checkpoint_seconds=chance.choice((0.1, 1.0, 100.0)), shape=shape, faults=faults,
            interrupts=tuple(chance.uniform(0, 15) for _ in range(chance.choice((0, 0, 0, 1, 2)))),
            away=tuple((begin, begin + chance.uniform(0.1, 20)) for begin in begins),
            pauses=tuple(chance.uniform(0, 20) for _ in range(chance.choice((0, 0, 0, 1)))),
        )  # fmt: skip


@dataclass(frozen=True)
class SimulatedSource:
    """Stands for a build function; the simulated workers have their own."""

    def load(self) -> Callable[[Any], Any]:
        raise AssertionError("the coordinator calls no build function")

    def describe(self) -> dict[str, Any] | None:
        return None

    def folder(self) -> str | None:
        return None

    def text(self) -> str | None:
        return None

    def uses_torch(self) -> bool:
        return False


class Ends(Display):
    """Counts the ends that a search shows, by trial."""

    shown: Counter[int]

    def trial_ended(self, number: int, outcome: Outcome) -> None:
        super().trial_ended(number, outcome)
        self.shown[number] += 1


@dataclass
class Found:
    """The result of one schedule: broken rules, faults and trials."""

    wrong: list[str] = field(default_factory=list)
    faults: int = 0
    runs: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """Virtual time."""


def run_schedule(schedule: Schedule, folder: Path, empty_database: Path) -> Found:
    """Run a search by a schedule, resume it while it is interrupted, and check it."""
    found, shown = Found(), Counter[int]()
    shutil.copyfile(empty_database, folder / "s.db")  # the same file again: an engine refuses another one
    shutil.rmtree(folder / "s_files", ignore_errors=True)
    (folder / "spill").mkdir(exist_ok=True)
    chance = Random(schedule.seed + 1)
    for run in range(RUNS):
        found.runs += 1
        interrupt = schedule.interrupts[run] if run < len(schedule.interrupts) else None
        if _run_once(schedule, folder, chance, found, shown, interrupt=interrupt, first=run == 0) or found.wrong:
            break
    else:
        found.wrong.append(f"interrupted after {RUNS} runs")
    if not found.wrong:
        _check(schedule, folder, found, shown)
    return found


def _run_once(
    schedule: Schedule, folder: Path, chance: Random, found: Found, shown: Counter[int], *, interrupt: float | None,
    first: bool,
) -> bool:  # fmt: skip
    """Run the search once; return True if it came to its end."""
    loop = VirtualLoop(LIMIT)
    faults = schedule.faults if first or chance.random() < 0.5 else NoFaults()
    world = World(loop, chance, faults, schedule.shape)
    settings = make_settings(
        trials=schedule.trials, study="s", storage=f"sqlite:///{folder}/s.db", devices=f"{schedule.devices}xcpu",
        strategy=schedule.strategy, sampler="random", seed=SEED, pruner=schedule.pruner, spill=str(folder / "spill"),
        deadline=3.0 + 2.0 * schedule.faults.seconds, checkpoint_seconds=schedule.checkpoint_seconds,
        keep_weights=100, progress=False, concurrency=schedule.concurrency, load_if_exists=True,
    )  # fmt: skip
    devices = parse_devices(settings.devices, settings.device_memory)
    with simulated_time(loop, world.latency, [study_thread, leases]), _away(loop, schedule), _roomy():
        display = Ends(settings, devices)
        display.shown = shown
        with run_directories(settings.spill) as directories:
            search = Search(SimulatedSource(), settings, devices, display, directories,
                            processes=lambda _modules: SimulatedProcesses(world))  # fmt: skip
            if interrupt is not None:
                loop.call_later(interrupt, search.interrupt_from_outside)
            for pause in schedule.pauses if first else ():
                loop.call_later(pause, loop.pass_time, 600.0)
            try:
                asyncio.set_event_loop(loop)
                loop.run_until_complete(search.run())
            except HydraTuneError as error:
                # Workers that die before they are ready, several times one after another, end a search.
                if "before it was ready" not in str(error) and "cannot be imported" not in str(error):
                    world.wrong.append(f"{type(error).__name__}: {error}")
                search.interrupted = True
            except Exception as error:
                world.wrong.append(f"{type(error).__name__}: {error}")
    found.wrong += [*world.wrong, *loop.errors]
    found.wrong += [f"in a thread: {thread.error!r}" for thread in loop.threads if thread.error is not None]
    found.wrong += ["a thread was left behind" for thread in loop.threads if not thread.done and not found.wrong]
    found.faults += world.events
    found.seconds += loop.time()
    _close(loop)
    return not search.interrupted


@contextmanager
def _away(loop: VirtualLoop, schedule: Schedule) -> Iterator[None]:
    """Make the database unwritable at the schedule's times; seldom look for what other processes changed: none do."""
    real, real_look, looks = OwnedStudy.flush, OwnedStudy.look_outside, itertools.count()

    def flush(study: OwnedStudy) -> None:
        if any(begin <= loop.time() < end for begin, end in schedule.away):
            raise DatabaseAway("the database is away", "simulated")
        real(study)

    def look_outside(study: OwnedStudy) -> None:
        if next(looks) % SELDOM == 0:
            real_look(study)

    with patch.object(OwnedStudy, "flush", flush), patch.object(OwnedStudy, "look_outside", look_outside):
        yield


@contextmanager
def same_engines() -> Iterator[None]:
    """Keep the engine of each database, whose statements are compiled once, for all schedules."""
    with patch.object(queued_database, "connect", cache(queued_database.connect)):
        yield


@contextmanager
def _roomy() -> Iterator[None]:
    """Let nothing depend on this machine's memory."""
    with patch.object(search_run, "Limits", _Limits):
        yield


class _Limits(search_run.Limits):
    """Limits of a machine that is never short of memory."""

    def has_room(self, running: int, ended: int) -> bool:
        room = super().has_room(running, ended)
        begins = room and self.trials > ended + running
        assert not begins or running < self.at_once + self._devices, "too many trials in flight"
        return room


def _close(loop: VirtualLoop) -> None:
    """Cancel what a search that failed has left, and close the loop."""
    loop.set_exception_handler(lambda _loop, _context: None)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    with suppress(Deadlock, TooLong):
        loop.run_until_complete(asyncio.sleep(20.0))
    asyncio.set_event_loop(None)
    loop.close()


def _check(schedule: Schedule, folder: Path, found: Found, shown: Counter[int]) -> None:
    """Check the trials of a study that has come to its end."""
    wrong = found.wrong
    with open_storage(f"sqlite:///{folder}/s.db", read_only=True) as storage:
        records = trial_records(storage, "s")
        for record in records:
            found.statuses[record.state] += 1
            attempts = [each.state for each in trial_attempts(storage, "s", record.number)]
            wrong += _wrong_of_trial(schedule, folder, record, attempts)
    if len(records) != schedule.trials:
        wrong.append(f"{len(records)} trials instead of {schedule.trials}")
    wrong += [f"the end of trial {number} was shown {count} times" for number, count in shown.items() if count != 1]
    if not schedule.interrupts and len(shown) != schedule.trials:
        wrong.append(f"{len(shown)} ends were shown")
    left = [*(folder / "spill").iterdir(), *folder.glob("s_files/*/*.checkpoints")]
    wrong += [f"{file.name} was left behind" for file in left]


def _wrong_of_trial(
    schedule: Schedule, folder: Path, record: TrialRecord, attempts: list[str]
) -> Iterator[str]:  # fmt: skip
    name, shape = f"trial {record.number}", schedule.shape
    counts = Counter(attempts)
    twice = record.state == "COMPLETE" and counts["COMPLETE"] > 1
    if not attempts or counts["RUNNING"] or attempts[-1] != record.state or twice:
        yield f"{name} is {record.state} after the attempts {attempts}"
    final = [state for state in attempts[:-1] if state != "INTERRUPTED" and not BUDGETS[Status(state)]]
    if final:
        yield f"{name} was tried again after it was {final[0]}"
    match record.state:
        case "COMPLETE":
            value, weights = expected(record.params, trial_seed(SEED, record.number), shape)
            if record.value != value:
                yield f"{name} has {record.value} instead of {value}"
            file = folder / "s_files" / "study-1" / f"trial-{record.number}.safetensors"
            if not shape.objective and (not file.exists() or int(file.read_text()) != weights):
                yield f"{name} has other weights"
        case "PRUNED" if shape.prunes:
            pass
        case "LOST" | "HUNG" if counts[record.state] > BUDGETS[Status(record.state)]:
            pass
        case _:
            yield f"{name} is {record.state} ({record.error})"
