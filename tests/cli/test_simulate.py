"""`hydra-tune simulate` on the command line: a report, one JSON document, and bad values refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hydra_tune.cli.app import run

pytestmark = pytest.mark.smoke
MOVING = ["--state-bytes", "1GiB", "--device-memory", "4GiB", "--bandwidth", "2GiB"]


def simulated(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, float]:
    assert run(["simulate", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_prints_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--policy", "lrtf", *MOVING]) == 0
    printed = capsys.readouterr().out
    for said in (
        "3,835 of 64 trials on 8 devices, lrtf",
        "makespan",
        "lower bound",
        "utilisation",
        "switches",
        "moved",
    ):
        assert said in printed


def test_json_has_the_scenario_and_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trials", "5", "--devices", "2", "--concurrency", "5", "--units", "12", "--spread", "0", "--seed", "7"]
    found = simulated(capsys, *flags, "--unit-seconds", "0.5", "--slack", "1")
    assert found["units"] == 5 * 12
    assert found["lower_bound"] == 5 * 12 * 0.5 / 2
    assert 1 <= found["makespan_vs_bound"] < 1.1
    assert found["scenario"]["slack"] == 1
    assert found["moved_bytes"] == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy", "lrft"], "policy cannot be 'lrft' (did you mean 'lrtf'? known: fair, fifo, lazy-lrtf"),
        (["--policy", "ranked"], "policy cannot be 'ranked' ("),
        (["--trials", "0"], "trials cannot be 0 (give a whole number of at least 1)"),
        (["--devices", "many"], "'many'"),
        (["--concurrency", "0"], "concurrency cannot be 0"),
        (["--units", "-1"], "units cannot be -1"),
        (["--unit-seconds", "0"], "unit_seconds cannot be 0.0 (give seconds, more than 0)"),
        (["--unit-seconds", "nan"], "unit_seconds cannot be nan"),
        (["--spread", "-1"], "spread cannot be -1.0"),
        (["--slack", "nan"], "slack cannot be nan"),
        (["--seed", "-5"], "seed cannot be -5"),
        (["--state-bytes", "10XB"], "state_bytes cannot be '10XB' (give a size such as 256MiB"),
        (["--bandwidth", "0"], "bandwidth cannot be '0'"),
        (["--bandwidth", "0.5"], "bandwidth cannot be 0"),
        (["--state-bytes", "2KiB", "--device-memory", "1KiB"], "give at least 2048"),
    ],
)
def test_bad_values(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert run(["simulate", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err


def test_it_needs_no_torch() -> None:
    program = "import sys\nfrom hydra_tune.cli.app import run\nrun(['simulate', '--json'])\n"
    program += "print([m for m in ('torch', 'optuna', 'sqlalchemy', 'numpy') if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "[]\n"
    assert json.loads(done.stdout)["units"] == 3835
