"""Several real processes on one database, some of them killed."""

import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import list_studies

CHILD = Path(__file__).parent / "child.py"
PARAMS = 5


@contextmanager
def child(command: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(CHILD), command, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


def check_simultaneous_opening(url: str, number: int = 8) -> None:
    with ExitStack() as stack:
        children = [stack.enter_context(child("open_fresh", url)) for _ in range(number)]
        assert [heard(process) for process in children] == ["ready"] * number
        for process in children:
            start(process)
        assert [finish(process).strip() for process in children] == ["0"] * number
    with open_storage(url) as storage:
        assert list_studies(storage) == []


def test_eight_processes_open_a_fresh_file_at_once(sqlite_url: str):
    check_simultaneous_opening(sqlite_url)


def test_eight_processes_open_a_fresh_server_database_at_once(postgresql_url: str):
    check_simultaneous_opening(postgresql_url)


def check_shared_study(url: str, writers: int, trials: int) -> None:
    """All write one study while this process polls: nobody is refused, no number is given twice."""
    with open_storage(url) as storage:
        optuna.create_study(study_name="shared", storage=storage)
    with ExitStack() as stack:
        reader = stack.enter_context(open_storage(url, read_only=True))
        children = [stack.enter_context(child("write_through", url, str(trials))) for _ in range(writers)]
        assert [heard(process) for process in children] == ["ready"] * writers
        for process in children:
            start(process)
        polls = 0
        while any(process.poll() is None for process in children):
            seen = reader.get_all_trials(1, deepcopy=False)
            assert [trial.number for trial in seen] == list(range(len(seen)))
            assert sum(list_studies(reader)[0].trials.values()) >= len(seen)
            polls += 1
        assert [finish(process).strip() for process in children] == ["done"] * writers
        assert polls > 1
        final = reader.get_all_trials(1)
    assert [trial.number for trial in final] == list(range(writers * trials))
    assert Counter(trial.state for trial in final) == {TrialState.COMPLETE: writers * trials}
    assert all(len(trial.params) == PARAMS and trial.user_attrs == {"whole": True} for trial in final)


def test_sixteen_writers_and_a_poller_share_a_file(sqlite_url: str):
    check_shared_study(sqlite_url, writers=16, trials=8)


def test_writers_and_a_poller_share_a_server(postgresql_url: str):
    check_shared_study(postgresql_url, writers=4, trials=5)


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_process_leaves_whole_trials_and_all_it_acknowledged(sqlite_url: str, seed: int):
    moment = random.Random(seed)
    for _ in range(2):  # Once on a new study, once on a study that a killed process left.
        with child("write_batches", sqlite_url) as process:
            heard_before = [heard(process) for _ in range(moment.randint(1, 40))]
            process.kill()
            assert process.stdout is not None
            acknowledged = [*heard_before, *process.stdout.read().split()]
        check_whole(sqlite_url, acknowledged=int(acknowledged[-1]))


def test_a_process_that_dies_within_a_flush_leaves_the_trials_of_the_last(sqlite_url: str):
    """At every second statement of a flush in turn, up to the commit."""
    for statement in range(2, 100, 2):
        url = sqlite_url.replace("studies", f"studies-{statement}")
        with child("die_in_flush", url, str(statement)) as process:
            assert process.stdout is not None
            said = process.stdout.read().split()
        if said == ["0", "survived"]:
            break
        assert said == ["0"]
        assert process.returncode == -signal.SIGKILL
        check_whole(url, acknowledged=0)
        with open_storage(url) as storage:
            assert storage.get_n_trials(1) == 1
            assert storage.get_trial_number_from_id(storage.create_new_trial(1)) == 1
    assert statement > 10  # BEGIN, two checks, six tables, COMMIT


def check_whole(url: str, acknowledged: int) -> None:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        (recorded,) = connection.execute("SELECT count(*) FROM hydra_trials").fetchone()
    with open_storage(url, read_only=True) as storage:
        trials = storage.get_all_trials(1)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert len(trials) >= acknowledged + 1
    assert recorded == len(trials)
    for trial in trials:
        assert trial.state == TrialState.COMPLETE
        assert len(trial.params) == PARAMS
        assert (trial.value, trial.intermediate_values, trial.user_attrs) == (1.0, {1: 0.5}, {"whole": True})
