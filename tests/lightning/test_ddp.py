"""Two processes on the CPU (gloo): rank 0 reports, its decision reaches every rank, nothing is called afterwards."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import hydra_tune as ht
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import trial_records
from tests.lightning import ddp_objectives

SPEC = Path(ddp_objectives.__file__)


def seen(folder: Path) -> dict[str, list[str]]:
    return {file.name: file.read_text().splitlines() for file in sorted(folder.glob("rank-*.txt"))}


def script(folder: Path, ending: str) -> subprocess.CompletedProcess[str]:
    """The objectives in a script, where their classes have no name that leads to them from elsewhere."""
    text = SPEC.read_text().split('if __name__ == "__main__":')[0]
    (folder / "script.py").write_text(text + "if __name__ == '__main__':\n" + textwrap.indent(ending, "    "))
    return subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True)


def test_ddp_spawn_in_a_search(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        "import hydra_tune as ht\n"
        "ht.search(spawn, trials=4, devices='1xcpu', pruner=Prune(), progress=False, study='s', sampler='random')\n",
    )
    assert done.returncode == 0, done.stderr
    with open_storage(f"sqlite:///{tmp_path}/hydra_tune.db", read_only=True) as storage:
        records = trial_records(storage, "s")
    assert [(record.state, record.error) for record in records] == [
        ("COMPLETE", ""),
        ("PRUNED", ""),
        ("DIVERGED", "val_loss became nan at step 8"),
        ("FAILED", "the metric 'val_los' was not logged (did you mean 'val_loss'? known: val_loss)"),
    ]
    assert records[0].user_attrs["lightning"]["processes"] == 2
    assert records[0].peak_device_bytes == records[0].user_attrs["lightning"]["peak_bytes"]
    rates = [record.params["lr"] for record in records]
    assert len(set(rates)) == 4
    # The metric that is missing may still be logged at the end of the epoch, so that trial validates once.
    validated = [(rates[0], range(3)), (rates[1], range(2)), (rates[2], range(2)), (rates[3], range(1))]
    wanted = [f"lr={rate!r} epoch={epoch}" for rate, epochs in validated for epoch in epochs]
    assert seen(tmp_path) == {"rank-0-of-2.txt": wanted, "rank-1-of-2.txt": wanted}


def test_ddp_spawn_with_a_plain_study_in_memory(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        "study = optuna.create_study(pruner=Prune())\nstudy.add_trial(optuna.create_trial(value=1.0))\n"
        "study.optimize(spawn, n_trials=1)\nprint(study.trials[1].state.name)\n",
    )
    assert done.stdout.splitlines()[-1] == "PRUNED", done.stderr
    assert [len(lines) for lines in seen(tmp_path).values()] == [2, 2]


def test_ddp_is_refused_inside_a_worker_which_goes_on() -> None:
    result = ht.search(ddp_objectives.relaunching, trials=2, devices="1xcpu", progress=False, study="refused")
    refused, next_one = result.trials
    assert refused.state == "FAILED"
    assert refused.error == (
        "a worker of a search cannot be run again as a script, as strategy 'ddp' of Lightning does (train with "
        "strategy='ddp_spawn' or with devices=1; 'ddp' is for scripts of their own)"
    )
    assert next_one.state == "COMPLETE"
    result.close()


def test_ddp_in_a_script_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SPEC)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trials = ast.literal_eval(done.stdout.splitlines()[-1])
    assert [(state, reports) for state, reports, _ in trials] == [("COMPLETE", 3), ("PRUNED", 2), ("COMPLETE", 3)]
    rates = [rate for *_, rate in trials]
    assert len(set(rates)) == 3
    wanted = [f"lr={rate!r} epoch={e}" for rate, epochs in zip(rates, (3, 2, 3), strict=True) for e in range(epochs)]
    assert seen(tmp_path) == {"rank-0-of-2.txt": wanted, "rank-1-of-2.txt": wanted}
    assert (tmp_path / "studies.txt").read_text() == "None\n", "only rank 0 made a study"


def test_a_script_whose_ranks_have_other_parameters_is_told(tmp_path: Path) -> None:
    done = script(tmp_path, "optuna.create_study().optimize(lambda trial: fit(trial, 'ddp'), n_trials=1)\n")
    assert done.returncode != 0
    assert "rank 1 has other parameters than rank 0" in done.stderr
    assert "optimize_ddp" in done.stderr
