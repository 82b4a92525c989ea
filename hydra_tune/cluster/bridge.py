"""The bridge: a process of its own that is the Ray driver of a search.

Ray ends a driver process when its head is gone, and brings signal handlers and threads of its own; none of that may
happen to the coordinator, which keeps the study. The bridge sees which nodes there are, starts an agent on each as a
detached actor, which outlives the bridge, and tells of nodes that are drained. It ends when the coordinator does.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from hydra_tune.cluster.bridge_messages import Connected, End, Free, Invite, Joined, Refused, Want
from hydra_tune.cluster.membership import News, NodeNews
from hydra_tune.cluster.order import Order
from hydra_tune.engine.channel import Channel, Closed

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
NAMESPACE = "hydra-tune"
AGAIN_SECONDS = 3.0
"""Seconds after which a node whose agent has ended gets another."""
BUSY_SECONDS = 20.0
"""Seconds that an agent waits for its node's devices before that is told."""
ATTEMPTS = 5
"""Agents of one node that may end before their time; then the node is left alone."""


@dataclass
class Started:
    """An agent on a node."""

    actor: Any
    result: Any
    """Reference to the result of its run."""
    since: float
    expected: bool = True
    """True until it has connected, or its delay was told."""


@dataclass
class Bridge:
    """The driver's state; everything runs on one thread."""

    channel: Channel
    ray: Any
    invite: Invite | None = None
    started: dict[str, Started] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    """When the last agent of a node ended."""
    counts: dict[str, int] = field(default_factory=dict)
    """Agents of each node that ended before their time."""
    left_alone: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    served: set[str] = field(default_factory=set)
    """Nodes with an agent that an earlier bridge started."""
    wanted: int = 0

    def tell(self, kind: News, node: str, text: str, hint: str = "") -> None:
        self.channel.send(NodeNews(kind, node, self.names.get(node, node[:8]), text, hint))

    def look(self) -> None:
        """Start agents on nodes without one, and take in the ends of others and the nodes that are drained."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        for node in alive:
            self._name(node)
        self._take_in_ends()
        self._look_for_drained()
        for node in alive:
            self._start(node)

    def _name(self, node: dict[str, Any]) -> None:
        """Give a node a name: its host's, with a number if there are several on that host."""
        id = node["NodeID"]
        if id in self.names:
            return
        host = re.sub(r"[^A-Za-z0-9._-]", "-", str(node.get("NodeManagerHostname") or node["NodeManagerAddress"]))
        others, name, number = set(self.names.values()), host, 2
        while name in others:
            name, number = f"{host}-{number}", number + 1
        self.names[id] = name

    def _start(self, node: dict[str, Any]) -> None:
        id, invite = node["NodeID"], self.invite
        waits = time.monotonic() - self.ended.get(id, -AGAIN_SECONDS) < AGAIN_SECONDS
        if (
            invite is None
            or waits
            or any(id in nodes for nodes in (self.started, self.served, self.left_alone, self.drained))
        ):
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from hydra_tune.cluster.ray_agent import RayAgent

        cpus, gpus = int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))
        if not cpus and not gpus:
            self.left_alone.add(id)
            self.tell(News.FAILED, id, f"node {self.names[id]} has no device: Ray counts no CPU and no GPU there",
                      "start it with ray start --num-cpus")  # fmt: skip
            return
        memory = int(node["Resources"].get("memory", 0))
        order = Order(invite.host, invite.port, invite.secret.hex(), id, self.names[id], max(1, cpus), gpus, memory)
        options = {
            "num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "lifetime": "detached",
            "name": f"{self.names[id]}-{invite.run}-{self.counts.get(id, 0)}-{time.time_ns()}", "namespace": NAMESPACE,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(id, soft=False),
        }  # fmt: skip
        actor = self.ray.remote(RayAgent).options(**options).remote()
        self.started[id] = Started(actor, actor.run.remote(order.text()), time.monotonic())

    def _take_in_ends(self) -> None:
        for id, started in list(self.started.items()):
            ready, _ = self.ray.wait([started.result], timeout=0)
            if ready:
                self._ended(id, started)
            elif started.expected and time.monotonic() - started.since > BUSY_SECONDS:
                started.expected = False
                self.tell(News.NOTED, id, f"node {self.names[id]} does not take part yet: something else on the "
                          "cluster holds its CPUs or GPUs, or it cannot start Python")  # fmt: skip

    def _ended(self, id: str, started: Started) -> None:
        from hydra_tune.cluster.ray_agent import FINISHED, OF_NO_USE

        del self.started[id]
        self.ended[id] = time.monotonic()
        try:
            how, said = self.ray.get(started.result)
        except self.ray.exceptions.ActorUnavailableError:
            # That may pass, and its agent goes on: the lease of its line decides.
            self.served.add(id)
            return
        except Exception as error:  # whatever Ray raises for an actor that could not run
            how, said = _why(error)
        self._kill(started)
        name = self.names[id]
        self.counts[id] = self.counts.get(id, 0) + 1
        if how == OF_NO_USE or self.counts[id] >= ATTEMPTS:
            self.left_alone.add(id)
            self.tell(News.FAILED, id, said if name in said else f"node {name} takes no part: {said}")
        elif how != FINISHED:
            self.tell(News.NOTED, id, f"node {name}: {said}; it gets another agent")

    def _look_for_drained(self) -> None:
        # Ray has no public call for this.
        from ray._private import state

        draining: dict[str, int] = getattr(state.state, "get_draining_nodes", dict)()
        for id in draining:
            if id not in self.drained:
                self.drained.add(id)
                self.tell(News.DRAINED, id, "Ray is about to take it away")

    def want(self, trials: int) -> None:
        """Ask an autoscaling cluster for devices for so many trials."""
        from ray.autoscaler.sdk import request_resources

        if trials != self.wanted:
            self.wanted = trials
            gpus = any(node["Resources"].get("GPU") for node in self.ray.nodes() if node["Alive"])
            request_resources(bundles=[{"GPU" if gpus else "CPU": 1}] * trials)

    def end(self) -> None:
        """End all agents, and give back what was asked for."""
        for started in self.started.values():
            self._kill(started)
        if self.wanted:
            self.want(0)

    def _kill(self, started: Started) -> None:
        try:
            self.ray.kill(started.actor)
        except Exception as error:  # it has ended with its node
            logger.debug("an actor could not be ended: %s", error)


def _why(error: Exception) -> tuple[str, str]:
    """Return how an agent ended by Ray's error: of no use if another would end alike."""
    from hydra_tune.cluster.ray_agent import DIED, OF_NO_USE

    text = " ".join(str(error).split())
    missing = re.search(r"No module named '([^']+)'", text)
    if missing:
        return OF_NO_USE, f"{missing[1]} is not installed there"
    if "memory" in text.lower() and "kill" in text.lower():
        return DIED, "Ray ended its agent because the node was short of memory"
    if type(error).__name__ == "ActorDiedError":
        return DIED, "its agent has died, alone or with Ray's processes there"
    return DIED, text[:300]


def connect(address: str) -> Any:
    """Connect to the cluster as its driver; return the module."""
    import ray

    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    ray.init(
        address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False
    )
    return ray


def serve(channel: Channel, address: str) -> None:
    """Serve the coordinator at the other end of the channel until it ends."""
    try:
        ray = connect(address)
    except Exception as error:  # told to the coordinator, which raises it for the user
        channel.send(Refused(" ".join(str(error).split())[:400]))
        return
    bridge = Bridge(channel, ray)
    try:
        channel.send(Connected(ray.util.get_node_ip_address(), ray.__version__))
        while _take_in(bridge):
            bridge.look()
    except Closed:
        logger.info("the coordinator has ended")
    finally:
        bridge.end()
        ray.shutdown()


def _take_in(bridge: Bridge) -> bool:
    """Take in messages for a while; return False at the end."""
    import pickle

    ready, _, _ = select.select([bridge.channel], [], [], LOOK_SECONDS)
    for data in bridge.channel.receive_ready() if ready else ():
        match pickle.loads(data):
            case Invite() as invite:
                bridge.invite = invite
                bridge.names |= invite.connected
                bridge.served = set(invite.connected)
            case Joined(node=id) if id in bridge.started:
                bridge.started[id].expected = False
                bridge.counts.pop(id, None)
            case Free(node=id):
                bridge.served.discard(id)
            case Want(trials=trials):
                bridge.want(trials)
            case End():
                return False
    return True


def main() -> None:
    """Serve on the socket whose descriptor is the argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the coordinator's to handle
    line = socket.socket(fileno=int(sys.argv[1]))
    serve(Channel(line), sys.argv[2])


if __name__ == "__main__":
    main()
