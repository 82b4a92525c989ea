"""Searches on the test accelerator: what every strategy promises holds on devices with memory of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_tune as ht
from hydra_tune.core.devices import parse_devices
from hydra_tune.core.errors import SpecError
from tests.accelerator.process import DeviceProcess, needs_compiler
from tests.candidates import plain_loop, small_candidate
from tests.fault.searches import run, started, wait_for
from tests.strategies.searches import rows

pytestmark = needs_compiler
TWO = "testdev:0,testdev:1"
MIB = 2**20


@pytest.fixture(autouse=True)
def environment() -> Iterator[pytest.MonkeyPatch]:
    """The environment of the searches; undone before the test is looked at for what it left behind."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HYDRA_TUNE_BACKENDS", "testdev=tests.accelerator.backend")
        environment.setenv("TESTDEV_DELAYS", "5:200")
        yield environment


def deep(**fields: Any) -> ht.Candidate:
    """Takes 1.1 MiB with its optimizer in float64: three shards and more on a device of 600 KiB."""
    # No bias before batch-norm: its gradient is zero but for rounding, which Adam makes steps of.
    layers: list[nn.Module] = [nn.Linear(32, 96, bias=False)]
    for _ in range(4):
        layers += [nn.BatchNorm1d(96), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(96, 96, bias=False)]
    given: dict[str, Any] = {
        "model": nn.Sequential(*layers, nn.Linear(96, 2)).double(), "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.AdamW, lr=0.01), "train": rows(43), "valid": rows(16), "batch_size": 10,
        "epochs": 2,
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def plain(maker: str, seed: int, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train on the device with a plain loop; called in the device's process."""
    torch.manual_seed(seed)
    candidate = {"deep": deep, "small": small_candidate}[maker](**fields)
    model, _ = plain_loop(candidate, seed, "testdev:0")
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def equals_the_plain_loop(
    result: ht.SearchResult, process: DeviceProcess, maker: str, tolerance: float = 1e-9, **fields: Any
) -> None:
    arguments = {"maker": maker, "seed": result.best_trial.seed, "fields": fields}
    expected = process.run(__name__, "plain", arguments)
    found = result.best_model().state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def search(build: Any, strategy: Any, **options: Any) -> ht.SearchResult:
    given = {"trials": 1, "devices": TWO, "device_memory": "64MiB", "seed": 11, "progress": False}
    return ht.search(build, strategy=strategy, **(given | options))


EXACT: dict[str, Any] = {
    "whole": "whole", "shard": "shard", "pipeline": {"name": "pipeline", "microbatches": 1},
    "one subnet": {"name": "ist", "subnets": 1, "local_steps": 3},
}  # fmt: skip


@pytest.mark.parametrize("strategy", EXACT.values(), ids=EXACT)
def test_exact_strategies_equal_a_plain_loop_on_the_device(strategy: Any, device_process: DeviceProcess) -> None:
    fields = {"accumulate": 4, "clip_grad_norm": 0.5}
    result = search(lambda trial: small_candidate(**fields), strategy)
    equals_the_plain_loop(result, device_process, "small", **fields)
    assert result.best_trial.device.startswith("testdev:")


@pytest.mark.parametrize("strategy", ["sparse", "ist", {"name": "elastic", "tau": 3}], ids=["sparse", "ist", "elastic"])
def test_the_other_strategies_train(strategy: Any) -> None:
    result = search(lambda trial: small_candidate(epochs=3), strategy)
    assert result.best_trial.state == "COMPLETE"
    assert result.best_value < 1.2  # log 3 is 1.1: what a constant guess has


def test_a_model_in_shards_stays_within_its_device_and_equals_a_plain_loop(
    device_process: DeviceProcess, environment: pytest.MonkeyPatch
) -> None:
    """Two trials at once, on a device that has a quarter more than the budget: what kernels take is estimated."""
    budget = 700 * 1024
    environment.setenv("TESTDEV_MEMORY", str(budget * 5 // 4))
    result = search(
        lambda trial: deep(), "shard", trials=2,
        devices="testdev:0", device_memory=budget, concurrency=2, sampler="random",
    )  # fmt: skip
    assert {record.state for record in result.trials} == {"COMPLETE"}
    for record in result.trials:
        assert record.shards > 2
        assert record.spill_read_bytes > MIB
        assert record.peak_device_bytes <= budget * 5 // 4
    equals_the_plain_loop(result, device_process, "deep")


def test_a_device_with_less_memory_than_it_says_is_out_of_memory(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TESTDEV_MEMORY", str(200 * 1024))
    with pytest.raises(ht.SearchFailed) as failed:
        search(lambda trial: deep(), "whole", devices="testdev:0")
    assert failed.value.result.trials[0].state == "OUT_OF_MEMORY"
    assert "testdev:0 is out of memory" in failed.value.result.trials[0].error
    failed.value.result.close()


def test_shards_recover_from_the_devices_own_error(
    device_process: DeviceProcess, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TESTDEV_MEMORY", str(1200 * 1024))
    result = search(lambda trial: deep(), "shard", devices="testdev:0", device_memory="1500KiB")
    assert result.best_trial.shards > 1
    equals_the_plain_loop(result, device_process, "deep")


@pytest.mark.skipif("HYDRA_TUNE_ACCELERATOR" not in os.environ, reason="slow: set HYDRA_TUNE_ACCELERATOR=1")
def test_a_killed_search_is_resumed_on_the_device(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    spec = Path(__file__).parents[1] / "strategies" / "sharded_candidates.py"
    arguments = [
        "search", f"{spec}:build", "--trials", "1", "--sampler", "random", "--seed", "4", "--devices", TWO,
        "--device-memory", "3MiB", "--checkpoint-seconds", "0.3", "--study", "s",
    ]  # fmt: skip
    with started(*arguments, folder=tmp_path) as killed:
        wait_for(lambda: next(tmp_path.rglob("*.safetensors"), None), "a checkpoint")
        killed.kill()
    resumed = run("resume", "s", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    shown = json.loads(run("show", "s", "0", "--json", folder=tmp_path).stdout)
    assert shown["state"] == "COMPLETE"
    assert shown["device"].startswith("testdev:")


def test_devices_are_named_and_counted(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TESTDEV_MEMORY", f"{64 * MIB},{32 * MIB}")
    assert [(d.name, d.memory) for d in parse_devices(TWO)] == [
        ("testdev:0", int(0.9 * 64 * MIB)), ("testdev:1", int(0.9 * 32 * MIB))
    ]  # fmt: skip
    with pytest.raises(SpecError, match="there is testdev:0, testdev:1"):
        parse_devices("testdev:7")
    environment.setenv("HYDRA_TUNE_BACKENDS", "testdev=no_such_module")
    with pytest.raises(SpecError, match="no_such_module"):
        parse_devices("testdev:0")
    environment.setenv("HYDRA_TUNE_BACKENDS", "testdev")
    with pytest.raises(SpecError, match="kind=module"):
        parse_devices("testdev:0")
