"""Devices of objectives: several trials on one, several devices for one, and not more trials than memory."""

from __future__ import annotations

import itertools
import os
import time

import optuna
import pytest

import hydra_tune as ht
from hydra_tune.coordinator.objective_admission import ObjectiveAdmission
from hydra_tune.core import devices, probe
from hydra_tune.core.devices import parse_devices
from hydra_tune.engine.scheduler import WorkerView
from hydra_tune.engine.unit import Memory, Role
from tests.candidates import build_small

MIB = 2**20


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four accelerators of 100 bytes."""
    monkeypatch.setattr(devices, "_accelerators", lambda: [f"cuda:{i}" for i in range(4)])
    monkeypatch.setattr(probe, "free_bytes", lambda _backends: {f"cuda:{i}": 112 for i in range(4)})


@pytest.mark.usefixtures("four")
def test_several_trials_on_one_device() -> None:
    found = parse_devices("cuda:0/2,cuda:3")
    assert [(each.name, each.torch_device, each.memory) for each in found] == [
        ("cuda:0-1", "cuda:0", 50), ("cuda:3", "cuda:3", 100), ("cuda:0-2", "cuda:0", 50),
    ]  # fmt: skip
    assert [each.torch_device for each in parse_devices("auto/2")][:5] == [*(f"cuda:{i}" for i in range(4)), "cuda:0"]
    assert [each.name for each in parse_devices("auto")] == [f"cuda:{i}" for i in range(4)]
    for wrong in ("cuda:0/0", "auto/99"):
        with pytest.raises(ht.SpecError, match="give 1 to 32 trials for each device"):
            parse_devices(wrong)


@pytest.mark.usefixtures("four")
def test_several_devices_for_one_trial() -> None:
    first, second = parse_devices("auto", per_trial=2)
    assert (second.name, second.memory, second.torch_devices) == ("cuda:2+cuda:3", 200, ("cuda:0", "cuda:1"))
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert first.environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
        assert second.environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
        patched.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,6,7")
        assert first.environment == {"CUDA_VISIBLE_DEVICES": "4,GPU-a"}
    assert parse_devices("cuda:1")[0].environment == {}
    with pytest.raises(ht.SpecError, match=r"devices_per_trial cannot be 3 with 4 devices"):
        parse_devices("auto", per_trial=3)
    with pytest.raises(ht.SpecError, match="give one or the other"):
        parse_devices("auto/2", per_trial=2)


@pytest.mark.usefixtures("four")
def test_an_objective_is_alone_on_a_shared_device_until_it_is_measured() -> None:
    admission = ObjectiveAdmission(parse_devices("cuda:0/3"))
    view = WorkerView(1, Role.DEVICE, device_memory=99, device_held={"a": admission.memory})
    assert not view.has_room("b", admission.memory)
    assert admission.measured(40)
    known = admission.memory
    assert known.needs == 44
    assert not admission.measured(41), "no larger than what was measured, within 5%"
    beside = WorkerView(1, Role.DEVICE, device_memory=99, device_held={"a": known})
    assert beside.has_room("b", known)
    assert not WorkerView(1, Role.DEVICE, device_memory=99, device_held={"a": known, "b": known}).has_room("c", known)
    assert WorkerView(1, Role.DEVICE, device_memory=9).has_room("c", known), "a trial by itself is never refused"
    assert not ObjectiveAdmission(parse_devices("auto")).memory.alone, "no device is shared"
    assert ObjectiveAdmission(parse_devices("2xcpu")).memory == Memory(0, of_device=True)


def test_a_trial_has_the_cores_of_its_devices() -> None:
    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("saw", [str(each) for each in trial.devices] + [os.environ["OMP_NUM_THREADS"]])
        return 0.0

    result = ht.search(objective, n_trials=1, devices="4xcpu", devices_per_trial=2, progress=False)
    assert result.trials[0].user_attrs["saw"] == ["cpu", str(2 * parse_devices("4xcpu")[0].threads)]
    assert result.trials[0].device == "cpu:0+cpu:1"
    result.close()


def test_devices_per_trial_is_for_objectives() -> None:
    with pytest.raises(ht.SpecError, match="devices_per_trial is for objectives"):
        ht.search(build_small, trials=1, devices="2xcpu", devices_per_trial=2, progress=False)


def large(trial: optuna.Trial) -> float:
    """Take 150 MiB, and say when."""
    began = time.time()
    taken = bytearray(150 * MIB)
    taken[::4096] = bytes(len(taken[::4096]))
    if trial.number % 2:
        trial.report(1.0, 0)
    time.sleep(0.1)  # the work of a trial
    trial.set_user_attr("span", [began, time.time()])
    return float(len(taken))


def test_no_more_objectives_at_once_than_there_is_memory_for() -> None:
    spans = {}
    for budget in ("100MiB", "1GiB"):
        result = ht.search(
            large, n_trials=6, devices="2xcpu", device_memory=budget, strategy="whole", progress=False, sampler="random"
        )
        spans[budget] = sorted(record.user_attrs["span"] for record in result.trials)
        result.close()
    # The first two begin together: only they tell what trials take.
    later = spans["100MiB"][2:]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(later))
    together = spans["1GiB"][2:]
    assert any(end > begin for (_, end), (begin, _) in itertools.pairwise(together))
