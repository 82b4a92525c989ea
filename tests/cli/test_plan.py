"""`hydra-tune plan`: prints tables and numbers, trains nothing, and leaves only measurements behind."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fault.searches import run

CANDIDATES = Path(__file__).parents[1] / "strategies" / "sharded_candidates.py"


def test_a_plan_has_every_strategy_and_says_what_the_search_takes(own_folder: Path) -> None:
    done = run(
        "plan",
        f"{CANDIDATES}:build",
        "--trials",
        "2",
        "--devices",
        "2xcpu",
        "--device-memory",
        "3MiB",
        "--json",
        folder=own_folder,
    )
    found = json.loads(done.stdout)
    assert len(found["candidates"]) == 2
    for candidate in found["candidates"]:
        choice = candidate["choice"]
        assert choice["strategy"] == "shard"  # a MiB or two do not hold it whole
        options = {option["strategy"]: option for option in choice["options"]}
        assert set(options) == {"whole", "shard", "pipeline", "pack", "sparse", "ist", "elastic"}
        assert "on a device of 3.0 MiB" in options["whole"]["refused"]
        assert options["shard"]["seconds"] > 0
        assert options["shard"]["parts"] > 1
    assert 0 < found["search"]["lower_bound_seconds"] <= found["search"]["makespan_seconds"] * 1.001
    assert found["one_more_device"]["devices"] == 3
    assert found["twice_the_memory"]["device_memory"] == 2 * found["search"]["device_memory"]
    assert not (own_folder / "hydra_tune.db").exists()
    assert list((own_folder / "hydra_tune_files" / "profiles").glob("*.json"))


def test_a_plan_for_people(own_folder: Path) -> None:
    (own_folder / "spec.yaml").write_text("space: mlp\ndata: digits\ntrials: 8\nepochs: 2\ndevices: 2xcpu\nseed: 1\n")
    said = run("plan", "spec.yaml", "--trials", "1", folder=own_folder).stdout
    assert "candidate 0:" in said
    assert "* whole" in " ".join(said.split())
    assert "8 such trials on 2 devices: about" in said
    assert "with one more device: about" in said
    assert "with twice the memory: about" in said


def test_bad_input_gets_one_line(own_folder: Path) -> None:
    done = run("plan", "nothing.yaml", folder=own_folder)
    assert done.returncode == 2
    assert "there is no file 'nothing.yaml'" in done.stderr
    done = run("plan", f"{CANDIDATES}:build", "--trials", "0", folder=own_folder)
    assert done.returncode == 2
    assert "trials cannot be 0" in done.stderr


def test_an_objective_cannot_be_planned(own_folder: Path) -> None:
    (own_folder / "objective.py").write_text("def build(trial):\n    return trial.suggest_float('x', 0, 1)\n")
    done = run("plan", "objective.py:build", "--devices", "2xcpu", folder=own_folder)
    assert done.returncode == 2
    assert "an ordinary objective runs as it is" in done.stderr
