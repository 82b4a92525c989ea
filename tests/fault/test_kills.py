"""kill -9, SIGINT, SIGTERM, SIGSTOP, hanging user code: nothing is lost, the result is that of an unbroken run."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shlex
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select

import hydra_tune as ht
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import trial_attempts
from hydra_tune.storage.tables import HYDRA_EVENTS
from tests.fault.searches import (
    COMMON,
    SPEC,
    kill_and_reap,
    run,
    started,
    undisturbed,
    values,
    wait_for,
    wait_for_checkpoint,
    workers_of,
)  # fmt: skip

SEARCH = ["search", f"{SPEC}:build", *COMMON, "--study", "s"]


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the values of the search if nothing disturbs it."""
    return undisturbed(*SEARCH, folder=tmp_path_factory.mktemp("unbroken"))


def intact(folder: Path) -> bool:
    with closing(sqlite3.connect(folder / "hydra_tune.db")) as connection:
        answer = connection.execute("PRAGMA integrity_check").fetchone()
    return bool(answer == ("ok",))


def nothing_left(pids: list[int]) -> None:
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the workers' end")


def test_a_killed_worker_costs_the_work_since_its_checkpoint(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, folder=tmp_path, own_template=True) as search:
        wait_for_checkpoint(tmp_path)
        for worker in workers_of(search):
            worker.kill()
        _, errors = search.communicate()
    assert search.returncode == 0, errors
    assert re.search(r"was killed \(signal 9\), probably out of host memory: it had taken .* [MG]iB", errors)
    assert values(tmp_path, "s") == unbroken
    with open_storage(f"sqlite:///{tmp_path}/hydra_tune.db", read_only=True) as storage:
        attempts = [trial_attempts(storage, "s", number) for number in range(3)]
    assert max(len(tries) for tries in attempts) == 2
    assert {tries[0].state for tries in attempts if len(tries) == 2} == {"LOST"}
    assert not list(tmp_path.glob("hydra_tune_files/*/*.checkpoints"))


def test_a_killed_coordinator_is_resumed_to_the_same_result(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, folder=tmp_path, own_template=True) as search:
        wait_for_checkpoint(tmp_path)
        pids = [worker.pid for worker in workers_of(search)]
        assert pids
        kill_and_reap(search)
    nothing_left(pids)
    assert intact(tmp_path)
    resumed = run("resume", "s", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert values(tmp_path, "s") == unbroken
    left = [entry for entry in Path("/dev/shm").glob("hydra-tune-*") if str(search.pid) in entry.name]
    assert not left, "the killed search's files in shared memory"
    assert not list(tmp_path.glob("hydra_tune_files/*/*.checkpoints"))


def test_packed_trials_lose_no_more_than_whole_ones(tmp_path: Path) -> None:
    """The workers are killed, then the coordinator: each trial goes on from a checkpoint of its own."""
    spec = f"{SPEC.with_name('packed_candidates.py')}:build"
    flags = ["--sampler", "random", "--seed", "4", "--devices", "1xcpu", "--trials", "4", "--checkpoint-seconds", "0.2"]
    whole = run(
        "search", spec, *flags, "--devices", "4xcpu", "--strategy", "whole", "--study", "whole", folder=tmp_path
    )
    assert whole.returncode == 0, whole.stderr
    with started(
        "search", spec, *flags, "--strategy", "pack", "--study", "s", folder=tmp_path, own_template=True
    ) as search:
        wait_for_checkpoint(tmp_path)
        for worker in workers_of(search):
            worker.kill()
        wait_for(lambda: _attempts(tmp_path) > 4, "another attempt")
        kill_and_reap(search)
    resumed = run("resume", "s", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    for mine, theirs in zip(values(tmp_path, "s"), values(tmp_path, "whole"), strict=True):
        assert mine[:3] == theirs[:3]
        assert mine[3] == pytest.approx(theirs[3], abs=1e-9)


def _attempts(folder: Path) -> int:
    with open_storage(f"sqlite:///{folder}/hydra_tune.db", read_only=True) as storage:
        return sum(len(trial_attempts(storage, "s", number)) for number in range(4))


def test_the_demo_is_resumed_by_the_command_it_printed(tmp_path: Path) -> None:
    demo = SPEC.parents[2] / "examples" / "digits.yaml"
    # Without a pruner: whether a trial is pruned depends on which others have reported by then.
    flags = ["--sampler", "random", "--pruner", "none", "--trials", "4"]
    unbroken = run("search", str(demo), *flags, "--json", folder=tmp_path)
    assert unbroken.returncode == 0, unbroken.stderr
    with started("search", str(demo), *flags, folder=tmp_path) as search:
        assert search.stderr is not None
        printed = list(itertools.takewhile(lambda line: not line.startswith("[1/4]"), search.stderr))
        kill_and_reap(search)
    (typed,) = [line.removeprefix("if it is interrupted: ") for line in printed if "if it is interrupted" in line]
    program, *words = shlex.split(typed)
    assert words[0] == "resume", program
    resumed = run(*words, "--json", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert len(json.loads(resumed.stdout)["trials"]) == 4
    assert json.loads(resumed.stdout)["best"]["value"] == json.loads(unbroken.stdout)["best"]["value"]


def test_another_seed_does_not_change_trials_in_flight(tmp_path: Path, unbroken: list[Any]) -> None:
    first = ["search", f"{SPEC}:build", *COMMON, "--trials", "2", "--study", "s"]
    with started(*first, folder=tmp_path) as search:
        wait_for_checkpoint(tmp_path)
        kill_and_reap(search)
    again = [*SEARCH, "--resume", "--seed", "5"]
    resumed = run(*again, folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    seen = values(tmp_path, "s")
    assert seen[:2] == unbroken[:2]
    assert seen[2] != unbroken[2]


BREEDING = """
import os, subprocess, time
from multiprocessing import get_context

def objective(trial):
    children = [subprocess.Popen(["sleep", "1000"]).pid]
    child = get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    with open("pids.tmp", "w") as file:
        file.write(f"{os.getpid()} {children[0]} {child.pid}")
    os.rename("pids.tmp", "pids")
    time.sleep(1000)
"""


def test_what_user_code_started_does_not_outlive_a_killed_coordinator(tmp_path: Path) -> None:
    (tmp_path / "breeding.py").write_text(BREEDING)
    command = ["search", "breeding.py:objective", "--trials", "1", "--devices", "1xcpu"]
    with started(*command, folder=tmp_path, own_template=True) as search:
        wait_for((tmp_path / "pids").exists, "the objective's children")
        named = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
        everything = psutil.Process(search.pid).children(recursive=True)
        assert {process.pid for process in named} < {process.pid for process in everything}
        assert any("reaper.py" in " ".join(process.cmdline()) for process in everything)
        kill_and_reap(search)
        psutil.wait_procs(everything)


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, folder=tmp_path) as search:
        place = wait_for_checkpoint(tmp_path).parent
        wait_for(lambda: len(list(place.glob("step-*.json"))) > 1 or not place.exists(), "a second checkpoint")
        kill_and_reap(search)
    newest = max(place.glob("step-*.safetensors"), key=lambda file: int(file.stem[5:]))
    data = bytearray(newest.read_bytes())
    data[-3] ^= 255
    newest.write_bytes(data)
    resumed = run("resume", "s", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert values(tmp_path, "s") == unbroken
    with closing(sqlite3.connect(tmp_path / "hydra_tune.db")) as connection:
        notes = [message for (message,) in connection.execute("SELECT message FROM hydra_events")]
    assert any("is damaged (checksum mismatch)" in note for note in notes)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_checkpoints_and_stops(tmp_path: Path, unbroken: list[Any], sent: int) -> None:
    with started(*SEARCH, "--checkpoint-seconds", "1000", folder=tmp_path) as search:
        wait_for(lambda: "train" in units(tmp_path), "training")
        pids = [worker.pid for worker in workers_of(search)]
        search.send_signal(sent)
        _, errors = search.communicate()
    assert search.returncode == 130
    assert "hydra-tune resume s" in errors
    assert list(tmp_path.glob("hydra_tune_files/*/*.checkpoints/*.json")), "the trials were checkpointed"
    nothing_left(pids)
    resumed = run("resume", "s", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert values(tmp_path, "s") == unbroken


def units(folder: Path) -> set[str]:
    if not (folder / "hydra_tune.db").exists():
        return set()
    with closing(sqlite3.connect(folder / "hydra_tune.db")) as connection:
        try:
            return {kind for (kind,) in connection.execute("SELECT kind FROM hydra_units")}
        except sqlite3.OperationalError:  # the tables are not there yet
            return set()


def signals_taken(pid: int) -> bool:
    """Return True if no signal is pending: the first was handled, so a second is not merged with it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return all(int(line.split()[1], 16) == 0 for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd")))


def test_two_signals_stop_at_once(tmp_path: Path) -> None:
    """An objective cannot be asked to stop: one Ctrl-C waits for it, the second does not."""
    (tmp_path / "long.py").write_text("import time\ndef objective(trial):\n    open('on', 'w')\n    time.sleep(600)\n")
    with started("search", "long.py:objective", "--trials", "1", "--devices", "1xcpu", folder=tmp_path) as search:
        wait_for((tmp_path / "on").exists, "the objective")
        pids = [worker.pid for worker in workers_of(search)]
        search.send_signal(signal.SIGINT)
        wait_for(lambda: not search.poll() and signals_taken(search.pid), "the first signal")
        search.send_signal(signal.SIGINT)
        search.wait()
    assert search.returncode in (-signal.SIGINT, 130)
    nothing_left(pids)


def test_user_code_that_hangs_is_ended_with_its_stacks() -> None:
    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", 0, 1)
        while trial.number == 1:
            pass
        return x

    result = ht.search(objective, trials=3, devices="2xcpu", deadline=1.0, study="hang", progress=False)
    states = [record.state for record in result.trials]
    assert states == ["COMPLETE", "HUNG", "COMPLETE"]
    assert "showed no sign of life for 1 s" in result.trials[1].error
    with open_storage("sqlite:///hydra_tune.db", read_only=True) as storage:
        attempts = trial_attempts(storage, "hang", 1)
    assert [attempt.state for attempt in attempts] == ["HUNG", "HUNG"]
    assert "in objective" in attempts[0].traceback


def test_a_stopped_worker_loses_its_unit_to_another(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, "--deadline", "3", folder=tmp_path) as search:
        wait_for_checkpoint(tmp_path)
        os.kill(workers_of(search)[0].pid, signal.SIGSTOP)
        _, errors = search.communicate()
    assert search.returncode == 0, errors
    assert values(tmp_path, "s") == unbroken


def test_a_search_that_is_paused_as_a_whole_goes_on(tmp_path: Path, unbroken: list[Any]) -> None:
    """Ctrl-Z and `fg`, with a deadline shorter than the pause."""
    with started(*SEARCH, "--deadline", "3", folder=tmp_path) as search:
        wait_for_checkpoint(tmp_path)
        stopped = [search.pid, *(worker.pid for worker in workers_of(search))]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5)  # the pause is what is tested
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        _, errors = search.communicate()
    assert search.returncode == 0, errors
    assert values(tmp_path, "s") == unbroken
    with open_storage(f"sqlite:///{tmp_path}/hydra_tune.db", read_only=True) as storage:
        attempts = [attempt.state for number in range(3) for attempt in trial_attempts(storage, "s", number)]
    assert attempts == ["COMPLETE"] * 3


class Continue(logging.Handler):
    """Wakes the stopped worker at the moment when it is given up, so that its result comes too late."""

    def emit(self, record: logging.LogRecord) -> None:
        if "shows no sign of life" in record.getMessage():
            os.kill(int(Path("stopped").read_text()), signal.SIGCONT)


def test_a_stopped_workers_late_result_is_refused_and_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def objective(trial: Any) -> float:
        if not os.path.exists("stopped"):
            Path("stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return -1.0
        return trial.suggest_float("x", 0, 1)

    # A second is enough for the result to arrive before the worker is killed, but not on a very busy machine.
    monkeypatch.setattr("hydra_tune.engine.process.DUMP_SECONDS", 4.0)
    caplog.set_level(logging.INFO, logger="hydra_tune.engine.engine")
    monkeypatch.setattr(logging.getLogger("hydra_tune.engine.engine"), "handlers", [Continue()])
    result = ht.search(objective, trials=1, devices="1xcpu", deadline=1.0, study="late", progress=False)
    assert 0 <= result.best_value <= 1
    with open_storage("sqlite:///hydra_tune.db", read_only=True) as storage:
        attempts = trial_attempts(storage, "late", 0)
        with storage.reading() as connection:
            events = select(HYDRA_EVENTS.c.kind, HYDRA_EVENTS.c.message).where(HYDRA_EVENTS.c.kind != "pool")
            notes = connection.execute(events).all()
    assert [attempt.state for attempt in attempts] == ["HUNG", "COMPLETE"]
    assert [tuple(note) for note in notes] == [
        ("refused", f"a late result of attempt {attempts[0].attempt_id} (build) on cpu:0")
    ]
    result.close()


def test_a_second_coordinator_is_refused_and_named_the_first(tmp_path: Path) -> None:
    (tmp_path / "gated.py").write_text(
        "import os, time\ndef objective(trial):\n    open('on', 'w')\n"
        "    while not os.path.exists('go'):\n        time.sleep(0.05)\n    return trial.suggest_float('x', 0, 1)\n"
    )
    flags = ["--trials", "1", "--devices", "1xcpu", "--study", "s"]
    with started("search", "gated.py:objective", *flags, folder=tmp_path) as search:
        wait_for((tmp_path / "on").exists, "the objective")
        second = run("resume", "s", folder=tmp_path)
        assert second.returncode == 2
        assert f"study 's' is being run by process {search.pid} on {os.uname().nodename}" in second.stderr
        kill_and_reap(search)
    (tmp_path / "go").touch()
    assert run("resume", "s", "-q", folder=tmp_path).returncode == 0, "a dead holder's lease is free at once"
