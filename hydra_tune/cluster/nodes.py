"""All nodes of a search: gives trials to them, and takes care of nodes that join, leave and are lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from hydra_tune.cluster.line import COORDINATOR_SILENCE
from hydra_tune.cluster.messages import (
    Ask,
    Attempt,
    Beat,
    Begin,
    Ended,
    Leave,
    Piece,
    Ready,
    Share,
    Stopping,
    Whole,
)
from hydra_tune.cluster.node import Node, Running, State
from hydra_tune.cluster.placing import Size, choose, rivals
from hydra_tune.cluster.shipping import WEIGHTS, Arriving, Sent, for_trial, send_directory
from hydra_tune.coordinator.attempts import Elsewhere
from hydra_tune.coordinator.files import StudyFiles
from hydra_tune.coordinator.trial_facts import TrialFacts
from hydra_tune.core.errors import HydraTuneError, NoRoom
from hydra_tune.core.states import Outcome, Status
from hydra_tune.strategies.base import Interrupted
from hydra_tune.training.remote_trial import TrialInfo

logger = logging.getLogger(__name__)

LOSSES = 3
"""Nodes that a trial may be lost with before it counts as lost itself: it may be what kills them."""
LATE_SECONDS = 60.0
"""Seconds for which the late words of a node that was given up are still heard, to refuse and note them."""


class Owner(Protocol):
    """The search that the nodes serve."""

    @property
    def files(self) -> StudyFiles:
        """Places of checkpoints and weights; the study is open."""
        ...

    def take(self, node: Node, ask: Ask) -> None:
        """Carry out what a node asks or tells."""

    def note(self, number: int | None, kind: str, message: str) -> None:
        """Record and show an event of a trial or of the study."""

    def nodes_changed(self) -> None:
        """Take note that nodes have become ready or have left."""

    def at_once(self, devices: int) -> int:
        """Return how many trials keep a node with so many devices busy."""
        ...

    def to_come(self) -> int:
        """Return how many trials are still to begin."""
        ...


@dataclass
class Nodes:
    """The nodes of one search, which run its attempts."""

    owner: Owner
    begin: Begin
    stop: asyncio.Event
    """Set when the search is being stopped."""
    nodes: dict[str, Node] = field(default_factory=dict)
    """Connected nodes, by name."""
    refused: dict[str, HydraTuneError] = field(default_factory=dict)
    """Why nodes are not used, by name."""
    objective_seen: bool = False
    ending: bool = False
    """True once the search has no more work for nodes."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _too_small: dict[int, Size] = field(default_factory=dict)
    """Size of the largest node for which a trial was too large, by trial."""
    _lost_with: dict[int, int] = field(default_factory=dict)
    """Nodes that each trial was lost with."""
    _unwritable: dict[str, OSError] = field(default_factory=dict)
    """Attempts whose weights could not be written here."""
    last_seen: float = field(default_factory=time.monotonic)
    """When a node was last ready, by the monotonic clock."""

    @property
    def ready(self) -> list[Node]:
        """Nodes that take trials."""
        return [node for node in self.nodes.values() if node.state is State.READY]

    # Attempts

    async def run(self, info: TrialInfo, facts: TrialFacts) -> Outcome:
        """Run one attempt on a node; raises Interrupted, Elsewhere, or NoRoom if the search cannot go on."""
        node = await self._place(info.number)
        running = node.running[info.attempt] = Running(info.number, facts, asyncio.get_running_loop().create_future())
        self._share()
        try:
            await self._send(node, info, facts)
            ended = await running.ended
        except LostTooOften as error:
            return error.outcome
        finally:
            node.running.pop(info.attempt, None)
            self._let_drained_go(node)
            self._share()
            self._changed.set()
        vars(facts).update(vars(ended.facts))
        facts.device = node.device(facts.device) if facts.device else ""
        return self._outcome(node, info, ended)

    def _outcome(self, node: Node, info: TrialInfo, ended: Ended) -> Outcome:
        """Return an attempt's outcome, or raise if the trial goes on elsewhere or ends the search."""
        number, outcome = info.number, ended.outcome
        unwritable = self._unwritable.pop(info.attempt, None)
        if unwritable is not None:
            raise NoRoom(f"the weights of trial {number} cannot be written ({unwritable})", "make room, then resume")
        if isinstance(ended.error, NoRoom) and len(self.ready) > 1:
            self.refuse(node, ended.error)
            raise Elsewhere(Outcome(Status.LOST, error=f"node {node.name}: {ended.error}"))
        if ended.error is not None:
            raise ended.error
        if outcome is None:
            if self.stop.is_set():
                raise Interrupted
            raise Elsewhere(Outcome(Status.INTERRUPTED))
        if outcome.status is Status.OUT_OF_MEMORY and any(n.size.holds_more_than(node.size) for n in self.ready):
            self._too_small[number] = node.size
            self.owner.note(number, "out of memory", f"too large for node {node.name}: it goes to a larger one")
            raise Elsewhere(outcome)
        return outcome

    async def _place(self, number: int) -> Node:
        """Wait for a node that has room for one more trial."""
        while not self.stop.is_set():
            floor = self._too_small.get(number)
            if floor is not None and not any(node.size.holds_more_than(floor) for node in self.ready):
                floor = None  # the larger node has left
            name = choose((node.place() for node in self.ready), floor)
            if name is not None:
                return self.nodes[name]
            self._changed.clear()
            stopped, changed = (asyncio.create_task(each.wait()) for each in (self.stop, self._changed))
            try:
                await asyncio.wait({stopped, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.cancel()
                changed.cancel()
        raise Interrupted

    async def _send(self, node: Node, info: TrialInfo, facts: TrialFacts) -> None:
        """Send an attempt to its node, after the checkpoints that it goes on from."""
        directory = self.owner.files.checkpoints(info.number)
        if directory.is_dir():
            sent = Sent()
            with contextlib.suppress(ConnectionError):  # the line's reader tells why
                await send_directory(node.line, for_trial(info.number), directory, sent)
            logger.info("trial %d: %d bytes of checkpoints sent to node %s", info.number, sent.bytes, node.name)
        node.line.send(Attempt(info, facts))

    # Nodes

    async def serve(self, node: Node) -> None:
        """Serve a connected node until it is gone."""
        arriving = Arriving(lambda attempt, kind: self._file(node, attempt, kind))

        async def handle(message: Any) -> None:
            if node.state is State.GONE:
                self._refuse_late(node, message)
                return
            await self._handle(node, message, arriving)

        self.nodes[node.name] = node
        self.refused.pop(node.name, None)
        node.line.send(self.begin)
        reading = asyncio.create_task(node.line.messages(handle), name=f"line of {node.name}")
        silence = asyncio.create_task(node.line.silent_for(COORDINATOR_SILENCE))
        try:
            done, _ = await asyncio.wait({reading, silence}, return_when=asyncio.FIRST_COMPLETED)
            if reading in done:
                self.lost(node, reading.result())
            else:
                self.lost(node, f"it was silent for {COORDINATOR_SILENCE:g} s")
                # A node that comes back to life is told to leave, and what it says is refused.
                node.line.send(Leave("the node was given up"))
                await asyncio.wait({reading}, timeout=LATE_SECONDS)
        finally:
            for task in (reading, silence):
                task.cancel()
            await asyncio.gather(reading, silence, return_exceptions=True)
            node.line.cut()
            self.lost(node, "the search has ended")

    async def _handle(self, node: Node, message: Any, arriving: Arriving) -> None:
        match message:
            case Beat(sent=there, answers=float(sent)):
                node.clock.sample(sent, there, time.time())
            case Ready(error=None):
                node.became_ready(message)
                self.last_seen = time.monotonic()
                self._nodes_changed()
            case Ready(error=HydraTuneError() as error):
                self.refuse(node, error)
            case Ask():
                self.owner.take(node, message)
            case Piece() | Whole():
                await self._file_arrives(node, message, arriving)
            case Ended(attempt=attempt):
                running = node.running.get(attempt)
                if running is None:
                    self._refuse_late(node, message)
                elif not running.ended.done():
                    running.ended.set_result(message)

    async def _file_arrives(self, node: Node, message: Piece | Whole, arriving: Arriving) -> None:
        try:
            await asyncio.to_thread(arriving.take, message)
        except OSError as error:
            running = node.running.get(message.attempt)
            if running is not None and message.kind == WEIGHTS:
                self._unwritable[message.attempt] = error
            elif running is not None and isinstance(message, Piece) and not message.offset:
                self.owner.note(running.number, "checkpoint", f"a checkpoint cannot be written here ({error})")

    def _file(self, node: Node, attempt: str, kind: str) -> Any:
        """Return where an attempt's weights or checkpoints belong; None if it no longer runs there."""
        running = node.running.get(attempt)
        if running is None:
            return None
        files = self.owner.files
        return files.weights(running.number) if kind == WEIGHTS else files.checkpoints(running.number)

    def _refuse_late(self, node: Node, message: Any) -> None:
        """Refuse what a node says of attempts that it has lost; the first word of each kind is noted."""
        if isinstance(message, Ask | Ended | Piece | Whole):
            node.late += 1
            if node.late == 1:
                word = type(message).__name__.lower()
                self.owner.note(None, "refused", f"node {node.name} came back after it was given up: its {word} of "
                                f"attempt {message.attempt} and all later ones are refused")  # fmt: skip

    def refuse(self, node: Node, error: HydraTuneError) -> None:
        """Use a node no more, for a reason of its own."""
        self.refused[node.name] = error
        self.lost(node, f"it is not used: {error}")
        node.line.send(Leave(str(error)))
        node.line.close()

    def lost(self, node: Node, reason: str) -> None:
        """Give a node up: its trials go on elsewhere, and what it still says is refused."""
        if node.state is State.GONE:
            return
        before, node.state = node.state, State.GONE
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
        if before is State.DRAINING and not node.running:
            reason = "it was drained"
        if self.ending:
            return
        self.owner.note(None, "node", f"node {node.name} has left: {reason}")
        for running in node.running.values():
            if not running.ended.done():
                running.ended.set_exception(self._lost_trial(running.number, node, reason))
        self._nodes_changed()

    def _lost_trial(self, number: int, node: Node, reason: str) -> Exception:
        losses = self._lost_with[number] = self._lost_with.get(number, 0) + 1
        outcome = Outcome(Status.LOST, error=f"node {node.name} was lost ({reason})")
        return Elsewhere(outcome) if losses <= LOSSES else LostTooOften(outcome)

    def drain(self, node: Node, because: str) -> None:
        """Let a node's trials checkpoint and go on elsewhere; then it leaves."""
        if node.state is not State.READY:
            return
        node.state = State.DRAINING
        self.owner.note(None, "node", f"node {node.name} is drained: {because}")
        node.line.send(Stopping())
        self._let_drained_go(node)
        self._nodes_changed()

    def _let_drained_go(self, node: Node) -> None:
        if node.state is State.DRAINING and not node.running:
            node.line.send(Leave("the node is drained"))

    def tell_all(self, message: object) -> None:
        """Send a message to every node."""
        for node in self.nodes.values():
            node.line.send(message)

    async def one_is_ready(self) -> None:
        """Wait until a node is ready, or none can be."""
        while not self.ready and not self.stop.is_set():
            self._changed.clear()
            await self._changed.wait()

    def nudge(self) -> None:
        """Look again: something outside has changed."""
        self._changed.set()

    def _nodes_changed(self) -> None:
        self._share()
        self._changed.set()
        self.owner.nodes_changed()

    def _share(self) -> None:
        """Tell nodes how many trials want their devices, where that has changed."""
        ready = self.ready
        total, to_come = sum(len(node.devices) for node in ready), self.owner.to_come()
        for node in ready:
            at_once = self.owner.at_once(len(node.devices))
            wanted = rivals(len(node.running), at_once, to_come, len(node.devices) / total)
            if (node.at_once, node.rivals) != (at_once, wanted):
                node.at_once, node.rivals = at_once, wanted
                node.line.send(Share(at_once, wanted))


class LostTooOften(Exception):
    """A trial was lost with several nodes: it counts as lost itself."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.error)
        self.outcome = outcome
