"""A study whose search was killed while it was made is in nobody's way."""

from __future__ import annotations

from typing import Any

import pytest

import hydra_tune as ht
from hydra_tune.coordinator.making import is_unfinished
from hydra_tune.coordinator.spec import stored_spec
from hydra_tune.core.errors import SpecError
from hydra_tune.storage import open_storage
from hydra_tune.storage.leases import this_process
from hydra_tune.storage.queries import study_summary

URL = "sqlite:///hydra_tune.db"
DEAD = {**this_process(), "process_started": 1.0}


def leave_unfinished(maker: dict[str, Any]) -> None:
    """Leave a study as a search does that is killed after its first transaction."""
    import optuna

    with open_storage(URL) as storage, storage.describing_new_studies(["loss"], {"making": maker}):
        optuna.create_study(study_name="s", storage=storage)


def objective(trial: Any) -> float:
    return float(trial.suggest_float("x", 0, 1))


@pytest.mark.parametrize("resume", [False, True])
def test_an_unfinished_study_is_made_anew(resume: bool) -> None:
    leave_unfinished(DEAD)
    found = ht.search(
        objective, trials=2, study="s", seed=1, sampler="random", devices="1xcpu", progress=False, resume=resume,
        enqueue=[{"x": 0.5}],
    )  # fmt: skip
    assert [trial.state for trial in found.trials] == ["COMPLETE", "COMPLETE"]
    assert found.trials[0].params == {"x": 0.5}
    with open_storage(URL, read_only=True) as storage:
        assert not is_unfinished(study_summary(storage, "s"))


def test_the_command_line_says_that_there_is_nothing_to_resume() -> None:
    leave_unfinished(DEAD)
    with pytest.raises(SpecError, match="study 's' has no trials: its search was killed while it began"):
        stored_spec(URL, "s", {})


def test_a_study_that_is_being_made_is_left_alone() -> None:
    leave_unfinished(this_process())
    with pytest.raises(SpecError, match="study 's' is being made by process"):
        ht.search(objective, trials=1, study="s", devices="1xcpu", progress=False)
