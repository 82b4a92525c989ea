"""The rules of exchange, the centre in its files, and clients in this process: sums, limits, bytes; and kill -9."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hydra_tune as ht
from hydra_tune.strategies.elastic.centre import Centre, shards_of
from hydra_tune.strategies.elastic.client import Client
from hydra_tune.strategies.elastic.rules import asynchronous, elastic
from hydra_tune.strategies.elastic.work import Work
from hydra_tune.strategies.shard.optimizers import OptimizerParts
from hydra_tune.strategies.subnets.phase import RoundsKit, State, start
from hydra_tune.strategies.subnets.structure import Structure
from hydra_tune.training.loop import Training
from tests.candidates import rows

CPU = torch.device("cpu")


def tensors(seed: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(7, 5, generator=generator, dtype=torch.float64),
        "b": torch.randn(11, generator=generator, dtype=torch.float64),
        **more,
    }


def centre_of(folder: Path, given: dict[str, torch.Tensor], shards: int = 1) -> Centre:
    centre = Centre([folder], "trial", shards_of(given, shards))
    centre.write(given)
    return centre


@pytest.mark.smoke
@settings(max_examples=25, deadline=None)
@given(alpha=st.floats(0.01, 0.99), shards=st.integers(1, 4), seed=st.integers(0, 999))
def test_an_exchange_conserves_the_sum(tmp_path_factory: Any, alpha: float, shards: int, seed: int) -> None:
    before, own = tensors(seed), tensors(seed + 1)
    sums = {name: before[name] + own[name] for name in own}
    centre = centre_of(tmp_path_factory.mktemp("c"), before, shards)
    moved = centre.exchange(own, elastic(alpha))
    after = centre.read()
    for name, total in sums.items():
        torch.testing.assert_close(after[name] + own[name], total, rtol=0, atol=1e-12)
        torch.testing.assert_close(after[name], before[name] + alpha * (tensors(seed + 1)[name] - before[name]))
    assert moved == 2 * sum(t.nbytes for t in own.values())
    assert centre.exchanges() == 1


def test_every_tensor_is_in_one_shard() -> None:
    given = {str(i): torch.zeros(i) for i in range(1, 20)}
    for count in (1, 3, 30):
        layouts = shards_of(given, count)
        names = [field.name for layout in layouts for field in layout.fields]
        assert sorted(names) == sorted(given)
        assert len(layouts) == min(count, len(given))


def test_with_learning_off_all_come_to_the_mean(tmp_path: Path) -> None:
    clients = [tensors(seed) for seed in range(1, 5)]
    centre = centre_of(tmp_path, tensors(0), shards=2)
    mean = {name: sum(each[name] for each in [*clients, tensors(0)]) / 5 for name in clients[0]}
    for _ in range(200):
        for own in clients:
            centre.exchange(own, elastic(0.9 / 4))
    for found in [*clients, centre.read()]:
        for name, expected in mean.items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-9)


def test_a_parameter_server_adds_what_each_client_has_learned(tmp_path: Path) -> None:
    centre = centre_of(tmp_path, tensors(0))
    learned = {name: torch.zeros_like(t) for name, t in tensors(0).items()}
    bases = [centre.read() for _ in range(3)]
    owns = [{name: t.clone() for name, t in base.items()} for base in bases]
    for turn in range(6):
        own, base = owns[turn % 3], bases[turn % 3]
        for name in own:
            step = torch.full_like(own[name], float(turn + 1))
            own[name] += step
            learned[name] += step
        centre.exchange(own, asynchronous(base))
        bases[turn % 3] = {name: t.clone() for name, t in own.items()}
        for name, found in centre.read().items():
            torch.testing.assert_close(found, tensors(0)[name] + learned[name], rtol=0, atol=1e-12)
            torch.testing.assert_close(own[name], found, rtol=0, atol=0)


def test_counters_go_to_the_furthest(tmp_path: Path) -> None:
    centre = centre_of(tmp_path, tensors(0, n=torch.tensor(5)))
    own = tensors(1, n=torch.tensor(3))
    centre.exchange(own, elastic(0.5))
    assert int(own["n"]) == int(centre.read()["n"]) == 5


# Clients


def kit_and_state(**fields: Any) -> tuple[RoundsKit, State]:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double(),
        "loss": nn.functional.cross_entropy, "optimizer": partial(torch.optim.SGD, lr=0.1), "train": rows(),
        "batch_size": 5, "epochs": 1,
    }  # fmt: skip
    candidate = ht.Candidate(**(given | fields))
    training = Training(candidate, candidate.train, None, 3, CPU)
    names = {id(p): name for name, p in training.model.named_parameters()}
    parts = OptimizerParts.of(training.optimizer, names)
    return RoundsKit(candidate, candidate.train, None, 3, Structure(), 1, 1, True, parts), start(training, parts, 1)


@pytest.mark.parametrize(("steps", "tau"), [(12, 1), (12, 4), (10, 4), (3, 16)])
def test_server_bytes_are_those_of_the_formula(tmp_path: Path, steps: int, tau: int) -> None:
    """2·K·P·⌈steps/τ⌉, counted where tensors come and go, and in the files."""
    kit, state = kit_and_state()
    clients, size = 3, sum(t.nbytes for t in state["tensors"].values())
    centre = centre_of(tmp_path, {name: t.detach() for name, t in state["tensors"].items()})
    written = centre.files[0].written_bytes
    made = [Client(kit, {**state, "tensors": centre.read()}, CPU, centre) for _ in range(clients)]
    for client in made:
        client.work(Work(0, 0, steps, "elastic", tau, 0.9 / clients))
    assert sum(client.server_bytes for client in made) == 2 * clients * size * -(-steps // tau)
    assert centre.exchanges() == sum(client.exchanges for client in made) == clients * -(-steps // tau)
    padding = sum(layout.size for layout in centre.layouts) - size
    assert centre.files[0].written_bytes - written == (size + padding) * clients * -(-steps // tau)


def test_a_client_that_never_exchanges_is_the_plain_loop(tmp_path: Path) -> None:
    kit, state = kit_and_state(accumulate=2)
    centre = centre_of(tmp_path, {name: t.detach() for name, t in state["tensors"].items()})
    client = Client(kit, state, CPU, centre)
    client.work(Work(0, 0, 10, "allreduce", 1, 0.9))
    client.work(Work(0, 10, 21, "allreduce", 1, 0.9))
    training = Training(kit.candidate, kit.train, None, kit.seed, CPU)
    training.train_for(1000.0)
    for name, tensor in training.named_tensors().items():
        torch.testing.assert_close(client.named_tensors()[name], tensor, rtol=0, atol=1e-12)
    assert client.steps == training.steps == 11
    assert client.server_bytes == 0


# kill -9

FOREVER = """
import os, sys, torch
from pathlib import Path
from hydra_tune.strategies.elastic.centre import Centre, shards_of
torch.set_num_threads(1)  # threads would not survive the fork
given = {name: torch.zeros(size) for name, size in (("a", 300_000), ("b", 200_000))}

def add_one(name, own, centre):
    centre += 1
    return centre.clone()

for two in sys.stdin:
    clients = []
    for _ in range(2):
        clients.append(os.fork())
        if clients[-1] == 0:
            centre = Centre([Path(sys.argv[1])], "trial", shards_of(given, int(sys.argv[2])))
            while True:
                centre.exchange(given, add_one)
    print(*clients, flush=True)
    for client in clients:
        os.waitpid(client, 0)
    print("both have ended", flush=True)
"""


@pytest.mark.parametrize("shards", [1, 2])
def test_a_centre_is_never_half_written_whenever_its_clients_are_killed(tmp_path: Path, shards: int) -> None:
    given = {name: torch.zeros(size) for name, size in (("a", 300_000), ("b", 200_000))}
    centre = centre_of(tmp_path, given, shards)
    chance = random.Random(shards)
    before = 0
    command = [sys.executable, "-c", FOREVER, str(tmp_path), str(shards)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        for _ in range(8):
            print("two", file=starter.stdin, flush=True)
            clients = [int(pid) for pid in starter.stdout.readline().split()]
            time.sleep(chance.uniform(0.0, 0.05))  # the instant is what is drawn, not waited for
            for client in clients:
                os.kill(client, signal.SIGKILL)
            starter.stdout.readline()
            before = whole_and_no_fewer(centre, before)
        starter.stdin.close()
    assert before > 0
    centre.exchange(given, elastic(0.5))
    assert centre.exchanges() == before + 1, "the lock of the dead is free"


def whole_and_no_fewer(centre: Centre, before: int) -> int:
    """How often the centre was exchanged, which each of its shards says of itself; no less than before."""
    found = centre.read()
    for layout, files in zip(centre.layouts, centre.files, strict=True):
        seen = {float(value) for field in layout.fields for value in found[field.name].unique()}
        assert seen == {float(files.notes["exchanges"])}, "a shard is whole, and says how often it was exchanged"
    assert centre.exchanges() >= before
    return int(centre.exchanges())
