"""Elastic exchange around a centre: accuracy and bytes for several tau against local SGD, and the cost of churn.

Everything runs in this process, one thread, with the code that workers run: clients and the centre in the spill store
(`strategies/elastic`). A virtual clock orders the ends of phases, so that runs can be repeated. In the churn run one
client is killed at half time in the middle of its phase, one joins at three quarters, and one is five times slower; the
others take over their batches. Updates that never reached the centre are counted.
"""

from __future__ import annotations

import heapq
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.ist import CPU, Task, digits, in_rounds, laid_out, state_bytes, synthetic
from benchmarks.report import arguments, finish
from hydra_tune.strategies.elastic.centre import Centre, shards_of
from hydra_tune.strategies.elastic.client import Client
from hydra_tune.strategies.elastic.work import BETA, Work
from hydra_tune.strategies.subnets.judging import judged

CLIENTS = 4
TAUS = (1, 4, 16, 64)
CHURN_TAU = 16


@dataclass(frozen=True)
class Centred:
    """Result of one training."""

    accuracy: float
    """Accuracy of the centre."""
    client_accuracy: float
    """Accuracy of a client at the end."""
    server_bytes: int
    lost_updates: int
    """Steps that never reached the centre."""
    joined: int
    """Total number of clients over time."""


class Batches:
    """Spans of tau batches, epoch after epoch."""

    def __init__(self, count: int, tau: int) -> None:
        self.count, self.tau, self.epoch, self.at = count, tau, 0, 0

    def next(self) -> tuple[int, int, int]:
        if self.at + self.tau > self.count:
            self.epoch, self.at = self.epoch + 1, 0
        self.at += self.tau
        return self.epoch, self.at - self.tau, self.at


def around_a_centre(task: Task, tau: int, seed: int, steps: int, *, churn: bool = False) -> Centred:
    """Train until all clients together have made `steps` each, on a virtual clock that counts steps."""
    kit, state = laid_out(task, CLIENTS, seed, dealt=False, local_steps=tau)
    phases = CLIENTS * -(-steps // tau)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        centre = Centre([Path(folder)], "trial", shards_of(state["tensors"], 1))
        centre.write({name: tensor.detach() for name, tensor in state["tensors"].items()})
        return _Run(kit, state, centre, Batches(len(task.train) // task.batch, tau), phases, tau, churn).run()


class _Run:
    def __init__(
        self, kit: Any, state: Any, centre: Centre, batches: Batches, phases: int, tau: int, churn: bool
    ) -> None:  # fmt: skip
        self.kit, self.state, self.centre, self.batches, self.tau, self.churn = kit, state, centre, batches, tau, churn
        self.phases = phases
        self.clients: dict[int, tuple[Client, float]] = {}
        """Each client and the time of one of its steps."""
        self.joined = 0
        self.queue: list[tuple[float, int, float, tuple[int, int, int]]] = []
        """Running phases: end, client, start, batches."""
        self.returned: list[tuple[int, int, int]] = []
        self.lost = 0

    def join(self, now: float, pace: float = 1.0) -> None:
        """Start a new client from the centre."""
        started = {**self.state, "tensors": self.centre.read()}
        client = Client(self.kit, started, CPU, self.centre)
        client.is_measured()
        self.clients[self.joined] = (client, pace)
        self.begin(self.joined, now)
        self.joined += 1

    def begin(self, index: int, now: float) -> None:
        span = self.returned.pop() if self.returned else self.batches.next()
        heapq.heappush(self.queue, (now + self.tau * self.clients[index][1], index, now, span))

    def kill(self, index: int, now: float) -> None:
        """Kill a client in the middle of its phase, which another client then repeats."""
        (phase,) = [each for each in self.queue if each[1] == index]
        self.queue.remove(phase)
        heapq.heapify(self.queue)
        self.lost += int((now - phase[2]) / self.clients[index][1])
        self.returned.append(phase[3])
        del self.clients[index]

    def run(self) -> Centred:
        for index in range(CLIENTS):
            self.join(0.0, pace=5.0 if self.churn and index == 0 else 1.0)
        done = 0
        bytes_of_the_gone = 0
        while done < self.phases:
            now, index, _began, span = heapq.heappop(self.queue)
            client = self.clients[index][0]
            client.work(Work(*span, "elastic", self.tau, BETA / len(self.clients)))
            done += 1
            self.begin(index, now)
            if self.churn and done == self.phases // 2:
                victim = max(i for i in self.clients if i != index)
                bytes_of_the_gone += self.clients[victim][0].server_bytes
                self.kill(victim, now + self.tau / 2)
            if self.churn and done == 3 * self.phases // 4:
                self.join(now)
        server_bytes = bytes_of_the_gone + sum(client.server_bytes for client, _ in self.clients.values())
        mine = {**self.state, "tensors": self.centre.read()}
        last = next(iter(self.clients.values()))[0]
        theirs = {**self.state, "tensors": {name: t.detach() for name, t in last.named_tensors().items()}}
        accuracies = [judged(self.kit, each, CPU)[0]["accuracy"] for each in (mine, theirs)]
        return Centred(*accuracies, server_bytes, self.lost, self.joined)


def percent(values: list[float]) -> str:
    points = [100 * value for value in values]
    return f"{statistics.mean(points):.2f}% ({min(points):.2f} to {max(points):.2f})"


def main() -> None:
    quick = arguments(__doc__ or "").quick
    torch.set_num_threads(1)
    seeds = range(2 if quick else 5)
    rows: list[tuple[str, str]] = []
    document: dict[str, Any] = {}
    exact = True
    for task in [digits()] if quick else [digits(), synthetic()]:
        steps = 96 if quick else task.steps
        size = state_bytes(task.widths)
        for tau in (4, 16) if quick else TAUS:
            runs = [around_a_centre(task, tau, seed, steps) for seed in seeds]
            local = [in_rounds(task, CLIENTS, seed, steps, dealt=False, local_steps=tau) for seed in seeds]
            exact &= all(run.server_bytes == 2 * CLIENTS * size * -(-steps // tau) for run in runs)
            found = {"centre": [run.accuracy for run in runs], "a client": [run.client_accuracy for run in runs]}
            moved = f"{runs[0].server_bytes / 2**20:9.1f} MiB"
            for name, values in {**found, "local SGD": [each.accuracy for each in local]}.items():
                rows.append(
                    (f"{task.name}, tau={tau}, {name}", f"{percent(values)}{moved if name == 'centre' else ''}")
                )
            document[f"{task.name}_tau{tau}"] = {
                "centre": statistics.mean(found["centre"]), "client": statistics.mean(found["a client"]),
                "local_sgd": statistics.mean(each.accuracy for each in local), "server_bytes": runs[0].server_bytes,
            }  # fmt: skip
            print(f"{task.name} tau={tau}", file=sys.stderr, flush=True)
        calm = [around_a_centre(task, CHURN_TAU, seed, steps) for seed in seeds]
        churned = [around_a_centre(task, CHURN_TAU, seed, steps, churn=True) for seed in seeds]
        gap = statistics.mean(100 * (a.accuracy - b.accuracy) for a, b in zip(calm, churned, strict=True))
        lost = [run.lost_updates for run in churned]
        rows.append((f"{task.name}, churn", f"{percent([run.accuracy for run in churned])}  {gap:+.2f} points behind"))
        document[f"{task.name}_churn"] = {"accuracy_gap_points": gap, "lost_updates": lost, "joined": churned[0].joined}
    document |= {
        "churn_accuracy_gap_points": document["digits_churn"]["accuracy_gap_points"],
        "lost_updates": max(document["digits_churn"]["lost_updates"]), "server_bytes_equal_formula": exact,
        "clients": CLIENTS, "churn_tau": CHURN_TAU, "seeds": len(seeds),
    }  # fmt: skip
    finish(rows, document)


if __name__ == "__main__":
    main()
