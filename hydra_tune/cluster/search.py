"""A search on a cluster: trials are asked, recorded and told here, and trained on nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy

from hydra_tune.cluster.cluster_limits import ClusterLimits
from hydra_tune.cluster.framing import new_secret
from hydra_tune.cluster.line import Line
from hydra_tune.cluster.listener import Listener
from hydra_tune.cluster.membership import Membership, News, NodeNews
from hydra_tune.cluster.messages import Ask, Begin, OutOfTime, Stopping, StopTrials
from hydra_tune.cluster.node import Node
from hydra_tune.cluster.node_calls import NodeCalls
from hydra_tune.cluster.nodes import Nodes
from hydra_tune.cluster.source_files import source_files
from hydra_tune.coordinator.attempts import RunsAttempts
from hydra_tune.coordinator.files import StudyFiles
from hydra_tune.coordinator.limits import Limits
from hydra_tune.coordinator.search_run import Search
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.core.errors import HydraTuneError, SpecError

PORT = "HYDRA_TUNE_CLUSTER_PORT"
"""Environment variable with the port to which agents connect; else any free one."""
LOOK_SECONDS = 0.25
NO_NODE_SECONDS = 300.0
"""Seconds without any node after which a search gives up; the study can be resumed."""


@dataclass
class ClusterSearch(Search):
    """One run of a search on the nodes of a cluster."""

    membership: Membership | None = None
    """The cluster; by default the Ray cluster that the settings name."""

    def _make_limits(self) -> Limits:
        return ClusterLimits(self.settings, self._strategy, self.failures, lambda: self._devices_of_nodes())

    def _devices_of_nodes(self) -> list[int]:
        return [len(node.devices) for node in self.nodes.ready]

    @asynccontextmanager
    async def _devices_at_work(self) -> AsyncIterator[None]:
        """Start an agent on each node, and wait for the first; end them at the end."""
        begin = Begin(self.source, source_files(self.source), _for_nodes(self.settings), os.getcwd())
        self.nodes = Nodes(self, begin, self._stop)
        self._calls = NodeCalls(self)
        self._cluster = self.membership or _ray(self.settings)
        secret = new_secret()
        listener = Listener(secret, self._serve, self._refuse)
        host = await self._cluster.open(self._hear)
        try:
            async with listener.open(host, int(os.environ.get(PORT, "0"))) as port:
                self._cluster.invite(host, port, secret)
                self._cluster.want(min(self.settings.trials, self.settings.concurrency or self.settings.trials))
                await self._first_node()
                try:
                    yield
                finally:
                    self.nodes.ending = True
        finally:
            await self._cluster.close()

    async def _first_node(self) -> None:
        """Wait for a node that can be used; raise the reason if there can be none."""
        loop = asyncio.get_running_loop()
        waiting, since = asyncio.create_task(self.nodes.one_is_ready()), loop.time()
        try:
            while not waiting.done() and not self._stop.is_set():
                await asyncio.wait({waiting}, timeout=LOOK_SECONDS)
                reason = self._hopeless or self._nobody(loop.time() - since)
                if reason is not None and not waiting.done():
                    raise reason
            if waiting.done():
                waiting.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    _hopeless: HydraTuneError | None = None
    """Why the cluster cannot be used."""

    def _nobody(self, waited: float) -> HydraTuneError | None:
        """Return the reason to wait no longer for a first node; None to go on waiting."""
        refused = self.nodes.refused
        if refused and not self.nodes.nodes and waited > SETTLED_SECONDS:
            first = next(iter(refused.values()))
            more = f"; {len(refused) - 1} more nodes are not used either" if len(refused) > 1 else ""
            return HydraTuneError(f"no node can be used: {first.message}{more}", first.hint)
        if waited > NO_NODE_SECONDS:
            return HydraTuneError(
                f"no node of the cluster has taken part within {waited:.0f} s",
                "check it with hydra-tune doctor --cluster",
            )
        return None

    # Nodes

    async def _serve(self, hello: dict[str, Any], line: Line) -> None:
        id = str(hello.get("node", ""))
        for before in [each for each in self.nodes.nodes.values() if each.id == id]:
            self.nodes.lost(before, "another agent has taken its place")
        node = Node(id, self._free_name(hello["name"], id), line)
        self._cluster.connected(id, node.name)
        try:
            await self.nodes.serve(node)
        finally:
            self._cluster.free(id)

    def _free_name(self, name: str, id: str) -> str:
        """Return a name that no other node has had in this run; the same for a node that comes back."""
        known = self._names.setdefault(id, name)
        others = {other for other_id, other in self._names.items() if other_id != id}
        number = 2
        while known in others or known in self.nodes.nodes:
            known = f"{name}-{number}"
            number += 1
        self._names[id] = known
        return known

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_storage(self.settings.storage)
        self._names: dict[str, str] = {}
        self._pools: set[frozenset[str]] = set()
        """Sets of devices that the search has had while trials ran."""

    def _refuse(self, name: str, error: HydraTuneError) -> None:
        self.nodes.refused[name] = error
        self.note(None, "node", f"node {name} is not used: {error}")
        self.nodes.nudge()

    def _hear(self, news: NodeNews) -> None:
        """Take in news of the cluster."""
        node = next((each for each in self.nodes.nodes.values() if each.id == news.node), None)
        if news.kind is News.DRAINED and node is not None:
            self.nodes.drain(node, news.text)
        elif news.kind is News.FAILED and news.name not in self.nodes.refused:
            self._refuse(news.name, HydraTuneError(news.text, news.hint))
        elif news.kind in (News.UNREACHABLE, News.NOTED):
            self.note(None, "cluster", news.text)
        elif news.kind is News.GAVE_UP:
            self._hopeless = HydraTuneError(news.text, news.hint)
            self.note(None, "cluster", str(self._hopeless))

    def nodes_changed(self) -> None:
        """Take the present nodes into the display and the limits."""
        devices = {node.device(device.name): device.memory for node in self.nodes.ready for device in node.devices}
        self.display.set_devices(devices)
        self._pools.add(frozenset(devices))
        self.makespan.devices = max(self.makespan.devices, len(devices))
        if self.study.opened:
            self._record_pool()
        if hasattr(self, "_trials"):
            self._trials.limits_raised()

    # A search on this machine has its devices instead

    def _attempts(self) -> RunsAttempts:
        self._pools.clear()
        self.nodes_changed()
        return self.nodes

    def _pool(self) -> dict[str, int]:
        return {node.device(device.name): device.memory for node in self.nodes.ready for device in node.devices}

    @asynccontextmanager
    async def _looked_after(self) -> AsyncIterator[None]:
        """Tell nodes what has changed while trials run, and end a search that has lost all nodes."""
        watching = asyncio.create_task(self._watch(), name="nodes")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        told: set[int] = set()
        stopping = out_of_time = False
        loop = asyncio.get_running_loop()
        alone_since: float | None = None
        wanted = -1
        while True:
            if self._stop.is_set() and not stopping:
                stopping = True
                self.nodes.tell_all(Stopping())
            if self._limits.ends_trials() and not out_of_time:
                out_of_time = True
                self.nodes.tell_all(OutOfTime())
            stopped = set(self.study.stopped) - told
            if stopped:
                told |= stopped
                self.nodes.tell_all(StopTrials(tuple(stopped)))
            if wanted != (now := self.to_come() + self._trials.running):
                wanted = now
                self._cluster.want(min(now, self.settings.concurrency or now))
            alone_since = None if self.nodes.ready else alone_since or loop.time()
            if alone_since is not None and (self._hopeless or loop.time() - alone_since > NO_NODE_SECONDS):
                self._trials.give_up(self._hopeless or _no_node_left())
            await asyncio.sleep(LOOK_SECONDS)

    def _makespan_line(self) -> str:
        """Return the line about the makespan; none if the devices have changed, as there is no shortest one then."""
        return super()._makespan_line() if len(self._pools) <= 1 else ""

    # Called by the nodes

    @property
    def files(self) -> StudyFiles:
        return self.study.files

    def take(self, node: Node, ask: Ask) -> None:
        self._calls.take(node, ask)

    def note(self, number: int | None, kind: str, message: str) -> None:
        self.display.show(message if number is None else f"trial {number}: {message}")
        if self.study.opened:
            self.study.record_event(number, kind, message)

    def at_once(self, devices: int) -> int:
        assert isinstance(self._limits, ClusterLimits)
        return self._limits.on_node(devices)

    def to_come(self) -> int:
        if not hasattr(self, "_trials"):
            return self.settings.trials
        return max(0, self._limits.trials - self._trials.finished - self._trials.running)

    def candidates_seen(self) -> None:
        if not self._limits.candidates_seen:
            self._limits.candidates_seen = True
            self._trials.limits_raised()
            self.nodes.nudge()

    def shipped(self, number: int, size: int) -> None:
        facts = self.runner.facts.get(number)
        if facts is not None:
            self.study.record_event(number, "shipped", f"{size} bytes of checkpoints")

    def spilled_on(self, node: Node, sampled: float, host_bytes: int, disk_bytes: int) -> None:
        node.spilled = host_bytes, disk_bytes
        if self.study.opened:
            every = [each.spilled for each in self.nodes.nodes.values()]
            self.study.record_spilled(sampled, sum(host for host, _ in every), sum(disk for _, disk in every))


WORKING_DIRECTORIES = "/runtime_resources/working_dir_files/"
"""Part of the path of the folder into which `ray job submit` unpacks a job's files."""
SETTLED_SECONDS = 5.0
"""Seconds after which refused nodes end a search that has no others."""


def _for_nodes(settings: SearchSettings) -> SearchSettings:
    """Return the settings that nodes need: no database, no objects of the coordinator's process."""
    pruner = None if settings.pruner in (None, "none") else "median"
    return replace(
        settings, storage="sqlite://", sampler="random", pruner=pruner, callbacks=(), catch=None, enqueue=(),
        progress=False, cluster=None,
    )  # fmt: skip


def _check_storage(url: str) -> None:
    """Raise a SpecError for an SQLite file in the folder that `ray job submit` makes and removes."""
    database = sqlalchemy.make_url(url).database or ""
    if url.startswith("sqlite") and WORKING_DIRECTORIES in str(Path(database).absolute()):
        raise SpecError(
            f"storage {url} would be in the folder of a Ray job, which is removed with the job, and may be on another "
            "machine than yours",
            "give a path outside of it such as sqlite:////home/you/study.db, or a database server",
        )


def _ray(settings: SearchSettings) -> Membership:
    from hydra_tune.cluster.bridge_client import RayMembership

    assert settings.cluster is not None
    return RayMembership(settings.cluster)


def _no_node_left() -> HydraTuneError:
    return HydraTuneError(
        f"no node is left, and none has joined for {NO_NODE_SECONDS:g} s",
        "nothing is lost: start nodes, then resume the study",
    )
