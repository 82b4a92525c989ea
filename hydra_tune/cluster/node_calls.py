"""Calls of a node's attempts on the coordinator: only those named here, and only of attempts that run there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from hydra_tune.cluster.messages import Answer, Ask
from hydra_tune.cluster.node import Node
from hydra_tune.coordinator.display import Display
from hydra_tune.coordinator.study_thread import StudyThread
from hydra_tune.engine.unit import Failure, Role, Unit, UnitResult


class Observing(Protocol):
    """The part of a search that hears of units, as from its own engine."""

    display: Display
    study: StudyThread

    def unit_started(self, unit: Unit, device: str) -> None: ...

    def unit_ended(self, unit: Unit, result: UnitResult) -> None: ...

    def late_result(self, unit: Unit, device: str) -> None: ...

    def worker_line(self, device: str, line: str) -> None: ...

    def call(
        self, unit: Unit, name: str, args: tuple[Any, ...], reply: Callable[[Any, Failure | None], None] | None
    ) -> None: ...

    def shipped(self, number: int, size: int) -> None:
        """Count bytes of checkpoints that a trial has sent."""

    def spilled_on(self, node: Node, sampled: float, host_bytes: int, disk_bytes: int) -> None:
        """Record the bytes in a node's spill store."""

    def candidates_seen(self) -> None:
        """Take note that `build` returns candidates."""


class NodeCalls:
    """Carries out what nodes ask and tell."""

    def __init__(self, search: Observing) -> None:
        self._search = search
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, node: Node, ask: Ask) -> None:
        """Carry out a call; one of an attempt that does not run on the node is refused and noted."""
        of_node = ask.number is None
        if not of_node and ask.attempt not in node.running:
            self.refuse(node, ask)
        elif ask.ask is None:
            self._tell(node, ask)
        elif ask.name == "call":
            self._call(node, ask)
        else:
            task = asyncio.create_task(self._answer(node, ask))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def refuse(self, node: Node, ask: Ask) -> None:
        """Refuse a call of an attempt that is over, and record that."""
        said = ask.args[0] if ask.name in ("call", "event") and ask.args else ask.name
        study = self._search.study
        if study.opened:
            study.record_event(ask.number, "refused", f"a late {said} of attempt {ask.attempt} on node {node.name}")
        if ask.ask is not None:
            node.line.send(Answer(ask.ask, error=ValueError(f"attempt {ask.attempt} is over")))

    async def _answer(self, node: Node, ask: Ask) -> None:
        study, number = self._search.study, ask.number
        assert number is not None
        assert ask.ask is not None
        try:
            match ask.name, ask.args:
                case "epoch", (int(epoch), dict(metrics)):
                    node.line.send(Answer(ask.ask, await study.epoch(number, epoch, metrics)))
                case "suggest_choice", (str(name), tuple(choices)):
                    node.line.send(Answer(ask.ask, await study.suggest(number, ask.attempt, name, choices)))
                case _:
                    raise ValueError(f"a node cannot ask for {ask.name!r}")
        except Exception as error:  # raised where it is awaited, on the node
            node.line.send(Answer(ask.ask, error=error))

    def _call(self, node: Node, ask: Ask) -> None:
        """Pass on a call of user code to the study; the answer comes on the study's thread."""
        loop, name, args, reply = asyncio.get_running_loop(), ask.args[0], ask.args[1], None
        if ask.ask is not None:
            asked = ask.ask

            def reply(value: Any, failure: Failure | None) -> None:
                loop.call_soon_threadsafe(node.line.send, Answer(asked, value, failure))

        self._search.call(_unit(ask), name, args, reply)

    def _tell(self, node: Node, ask: Ask) -> None:
        search, study, number = self._search, self._search.study, ask.number
        match ask.name, ask.args:
            case "show", (str(text),):
                search.display.show(f"[{node.name}] {text}")
            case "worker_line", (str(device), str(text)):
                search.worker_line(node.device(device), text)
            case "candidates", ():
                search.candidates_seen()
            case "spilled", (float(sampled), int(host), int(disk)):
                search.spilled_on(node, sampled - node.clock.seconds, host, disk)
            case "event", (str(kind), str(message)) if study.opened:
                study.record_event(number, kind, message if number is not None else f"node {node.name}: {message}")
            case _ if number is not None:
                self._tell_of_trial(node, ask, number)

    def _tell_of_trial(self, node: Node, ask: Ask, number: int) -> None:
        search, study = self._search, self._search.study
        match ask.name, ask.args:
            case "call", _:
                self._call(node, ask)
            case "unit_started", (Unit() as unit, str(device)):
                search.unit_started(unit, _named(node, unit, device))
            case "unit_ended", (Unit() as unit, UnitResult() as result):
                search.unit_ended(unit, _placed(node, unit, result))
            case "late_result", (Unit() as unit, str(device)):
                search.late_result(unit, node.device(device))
            case "progress", (blueprint, progress):
                search.display.trial_progress(number, blueprint, progress)
            case "steps", (str(device), tuple(steps)):
                moved = [replace(step, started=step.started - node.clock.seconds) for step in steps]
                study.record_steps(number, ask.attempt, node.device(device), moved)
            case "checkpoint", (int(step), int(size), float(seconds)):
                study.record_checkpoint(number, step, size, seconds)
            case "shipped", (int(size),):
                search.shipped(number, size)
            case _:
                study.record_event(number, "refused", f"node {node.name} said {ask.name!r}, which is not known")


def _named(node: Node, unit: Unit, device: str) -> str:
    """Return a device's name among all nodes; builders, which are no devices, keep theirs."""
    return node.device(device) if unit.role is Role.DEVICE else device


def _placed(node: Node, unit: Unit, result: UnitResult) -> UnitResult:
    """Return a result with the device's name among all nodes, and times by the coordinator's clock."""
    ahead = node.clock.seconds
    steps = tuple(replace(step, started=step.started - ahead) for step in result.steps)
    return replace(result, device=_named(node, unit, result.device), started=result.started - ahead, steps=steps)


def _unit(ask: Ask) -> Unit:
    assert ask.number is not None
    return Unit(trial=ask.number, attempt=ask.attempt, kind="build", work=_unit)
