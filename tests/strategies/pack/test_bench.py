"""Benches: who trains together, when a turn begins, and where trials go. No processes, no tensors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra_tune.engine.unit import Failure, UnitFailed
from hydra_tune.strategies.pack.bench import Bench, Room, Seat, choose
from hydra_tune.strategies.pack.strategy import Pack
from hydra_tune.strategies.pack.turn import Trained, Turn
from hydra_tune.training.progress import Progress


class _Engine:
    """Answers each turn by `turns`, which see the attempts that take part."""

    def __init__(self, turn: Any) -> None:
        self.turn = turn
        self.seen: list[list[str]] = []

    async def run(self, attempts: list[str]) -> Any:
        self.seen.append(attempts)
        await asyncio.sleep(0)
        return _Result(self.turn(attempts))


@dataclass
class _Result:
    value: Turn
    seconds: float = 0.0


class _Room(Room):
    def unit(self, lead: Any, runs: Sequence[Any], keep: Any, worker: int, remaining: Any) -> Any:
        return _Attempts(run.attempt for run in runs)


class _Attempts(list[str]):
    kind = "train"


class _Run:
    """What a seat needs of its trial."""

    def __init__(self, number: int, engine: Any = None) -> None:
        self.number, self.attempt, self.engine = number, f"{number}-1", engine

    def measured(self, kind: str, seconds: float) -> None:
        """Nothing keeps it here."""


def seat(
    number: int, worker: int = 0, batch: int = 0, turns: int = 0, signature: str = "s", engine: Any = None
) -> Seat:
    run: Any = _Run(number, engine)
    return Seat(run, worker, signature=signature, batch=batch, turns=turns)


def epoch(attempts: Sequence[str]) -> Turn:
    done = Progress(epoch=0, batch=4, batches=4, steps=4, loss=1.0, batches_done=4, seconds=0.1)
    return Turn({attempt: Trained(done, {"loss": 1.0}) for attempt in attempts})


def seated(turn: Any, count: int, size: int = 8) -> tuple[Room, _Engine, list[Seat]]:
    room, engine = _Room(), _Engine(turn)
    seats = [seat(number, engine=engine) for number in range(count)]
    for each in seats:
        room.enter(each)
        room.sit(each, size)
    return room, engine, seats


async def train(room: Room, each: Seat, epochs: int) -> int:
    """Train as a trial does: between two turns it reports, which takes a moment."""
    for _ in range(epochs):
        trained = await room.bench_of(each).train(each, None)
        assert trained.progress is not None
        for _ in range(each.run.number):
            await asyncio.sleep(0)
    room.leave(each)
    return each.turns


def test_a_turn_begins_when_all_wait_for_it_and_each_result_arrives_once() -> None:
    async def search() -> list[int]:
        room, engine, seats = seated(epoch, 4)
        turns = await asyncio.gather(*(train(room, each, 3) for each in seats))
        assert engine.seen == [["0-1", "1-1", "2-1", "3-1"]] * 3
        assert not room.benches
        return turns

    assert asyncio.run(search()) == [3, 3, 3, 3]


def test_more_seats_than_a_pack_holds_take_turns() -> None:
    async def search() -> None:
        room, engine, seats = seated(epoch, 5, size=2)
        await asyncio.gather(*(train(room, each, 2) for each in seats))
        assert all(len(attempts) <= 2 for attempts in engine.seen)
        assert sorted(itertools.chain.from_iterable(engine.seen)) == sorted(2 * [each.run.attempt for each in seats])

    asyncio.run(search())


def test_what_cannot_be_packed_goes_on_alone() -> None:
    async def search() -> None:
        room, engine, seats = seated(lambda a: epoch(a) if len(a) == 1 else Turn({}, refused="odd"), 3)
        await asyncio.gather(*(train(room, each, 2) for each in seats))
        assert [each.refused for each in seats] == ["odd"] * 3
        assert [len(attempts) for attempts in engine.seen] == [3] + [1] * 6

    asyncio.run(search())


def test_a_members_failure_is_its_own_and_a_lost_unit_is_everyones() -> None:
    def one_fails(attempts: Sequence[str]) -> Turn:
        turn = epoch(attempts)
        if len(attempts) == 2:
            turn.results["0-1"] = Trained(failure=Failure("ValueError", "no", ""))
        return turn

    async def one() -> None:
        room, _engine, seats = seated(one_fails, 2)
        turns = (room.bench_of(each).train(each, None) for each in seats)
        failed, trained = await asyncio.gather(*turns, return_exceptions=True)
        assert isinstance(failed, UnitFailed)
        assert failed.failure.message == "no"
        assert isinstance(trained, Trained)

    def lost(attempts: Sequence[str]) -> Turn:
        raise ConnectionError("the worker is gone")

    async def every() -> None:
        room, _engine, seats = seated(lost, 3)
        found = await asyncio.gather(*(room.bench_of(each).train(each, None) for each in seats), return_exceptions=True)
        assert [str(each) for each in found] == ["the worker is gone"] * 3

    asyncio.run(one())
    asyncio.run(every())


def test_a_cancelled_search_leaves_no_turn_behind() -> None:
    async def search() -> None:
        room, engine, seats = seated(epoch, 2)
        never = asyncio.Event()

        async def hangs(attempts: list[str]) -> None:
            engine.seen.append(attempts)
            await never.wait()

        vars(engine)["run"] = hangs
        trials = [asyncio.create_task(train(room, each, 1)) for each in seats]
        while not engine.seen:
            await asyncio.sleep(0)
        for trial in trials:
            trial.cancel()
        await asyncio.gather(*trials, return_exceptions=True)
        for each in seats:
            room.leave(each)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(search())


def test_seats_amid_an_epoch_go_first_and_then_those_with_the_fewest_turns() -> None:
    seats = [seat(0, turns=3), seat(1), seat(2, batch=4, turns=9), seat(3, batch=4), seat(4, batch=2)]
    assert [each.run.number for each in choose(seats, 8)] == [3, 2]
    assert [each.run.number for each in choose(seats[:2], 1)] == [1]


def test_trials_go_where_their_shape_is_and_else_where_few_are() -> None:
    room = Room()
    for number, (worker, signature) in enumerate([(7, "a"), (7, "a"), (8, "b")]):
        taken = seat(number, worker, signature=signature)
        room.enter(taken)
        assert isinstance(room.sit(taken, 4), Bench)
    assert room.place([7, 8], "a", 4) == 7
    assert room.place([7, 8], "a", 2) == 8  # its bench is full
    assert room.place([7, 8], "", 4) == 8
    assert room.place([7, 8, 9], "a", 4) == 9  # idle
    room.leave(room.seats[0])
    room.leave(room.seats[0])
    assert (7, "a") not in room.benches


def test_more_trials_may_be_in_flight_as_long_as_they_share_benches() -> None:
    strategy = Pack(size=16)
    assert strategy.trials_at_once(2) == 8
    for number in range(4):
        strategy.room.enter(seat(number))
        strategy.room.sit(strategy.room.seats[-1], 16)
    assert strategy.trials_at_once(2) == 12
    for number in range(4, 8):  # each of a shape of its own
        strategy.room.enter(seat(number, signature=str(number)))
        strategy.room.sit(strategy.room.seats[-1], 16)
    assert strategy.trials_at_once(2) == 8
