"""Settings are declared once: the signature of `ht.search`, the flags and what is stored agree with the declaration."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, fields
from pathlib import Path

import optuna
import pytest

import hydra_tune as ht
from hydra_tune.cli.search import search as command
from hydra_tune.coordinator.settings import NAMES, SearchSettings, make_settings
from hydra_tune.coordinator.spec import read_spec

pytestmark = pytest.mark.smoke


def test_the_signature_of_search_is_the_declaration() -> None:
    build, *arguments, optunas = inspect.signature(ht.search).parameters.values()
    assert (build.name, optunas.kind) == ("build", inspect.Parameter.VAR_KEYWORD)
    # Optuna's own values are accepted for these, and translated before they become settings.
    wider = {
        "direction": "str | StudyDirection | Sequence[str | StudyDirection]",
        "storage": "str | optuna.storages.BaseStorage | None",
    }
    for argument, field in zip(arguments, fields(SearchSettings), strict=True):
        filled_in = field.default_factory is not MISSING
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        assert argument.name == field.name
        assert argument.kind is inspect.Parameter.KEYWORD_ONLY
        plain = f"{field.type} | None" if filled_in else field.type
        assert argument.annotation == wider.get(argument.name, plain)
        assert argument.default == (None if filled_in else default)


def test_every_setting_has_a_flag_but_those_that_flags_cannot_say() -> None:
    flags = inspect.signature(command).parameters
    assert [name for name in NAMES if name not in flags] == ["enqueue", "callbacks", "catch", "progress"]


def test_a_flag_that_is_not_given_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("space: mlp\ntrials: 2\nmetric: [accuracy, loss]\ndirection: [maximize, minimize]\n")
    unsaid = dict.fromkeys(inspect.signature(command).parameters.keys() & set(NAMES))
    found = read_spec(str(spec), {**unsaid, "trials": 3, "strategy": "{name: pipeline, microbatches: 8}"}).settings
    assert (found.trials, found.metrics, found.directions) == (3, ("accuracy", "loss"), ("maximize", "minimize"))
    assert found.strategy == {"name": "pipeline", "microbatches": 8}
    one = read_spec(str(spec), {**unsaid, "metric": ["loss"], "direction": ["minimize"]}).settings
    assert (one.metrics, one.directions) == (("loss",), ("minimize",))


def test_what_is_stored_is_plain_and_makes_the_same_settings(tmp_path: Path) -> None:
    given = {
        "trials": 4,
        "devices": "2xcpu",
        "devices_per_trial": 1,
        "device_memory": "1GiB",
        "strategy": {"name": "shard"},
        "deadline": 9.5,
    }
    settings = make_settings(**given, spill=str(tmp_path), study="s", sampler=optuna.samplers.RandomSampler(), seed=1)
    stored = json.loads(json.dumps(settings.stored()))
    assert stored == given | {
        "spill": str(tmp_path), "sampler": "RandomSampler", "pruner": None, "concurrency": None, "keep_weights": 10,
        "checkpoint_seconds": 10.0,
    }  # fmt: skip
    assert make_settings(**stored, study="s").stored() == stored


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metric": []}, r"metric cannot be \[\] \(give a name"),
        ({"metric": ["a", "a"], "direction": ["minimize"] * 2}, r"metric cannot be \['a', 'a'\] \(name each"),
        ({"seed": 2**32}, "below 2\\*\\*32"),
        ({"keep_weights": True}, "keep_weights cannot be True"),
        ({"checkpoint_seconds": 0}, "checkpoint_seconds cannot be 0"),
        ({"stop_at_timeout": True}, "stop_at_timeout needs a timeout"),
        ({"enqueue": {"lr": 1}}, "enqueue cannot be"),
        ({"storage": 3}, "storage cannot be 3"),
        ({"resume": True}, "resume needs the name of a study"),
    ],
)
def test_bad_values(given: dict[str, object], said: str) -> None:
    with pytest.raises(ht.SpecError, match=said):
        make_settings(trials=1, **given)
