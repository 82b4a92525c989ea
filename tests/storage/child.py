"""Processes that the tests start: `python child.py COMMAND URL ...`."""

import os
import signal
import sys
from collections.abc import Callable
from itertools import count

import optuna
import sqlalchemy

from hydra_tune.storage import HydraStorage, open_storage
from hydra_tune.storage.records import StudyRecords

PARAMS = 5


def say(text: str) -> None:
    print(text, flush=True)


def run_trial(study: optuna.Study) -> None:
    trial = study.ask()
    for i in range(PARAMS):
        trial.suggest_float(f"x{i}", 0, 1)
    trial.report(0.5, 1)
    trial.set_user_attr("whole", True)
    study.tell(trial, 1.0)


def run_and_record(study: optuna.Study, storage: HydraStorage) -> int:
    """A trial with its record, in one flush; its number."""
    number = len(study.get_trials(deepcopy=False))
    run_trial(study)
    StudyRecords(storage, study._study_id).trial(number, status="COMPLETE", seed=number)
    storage.flush()
    return number


def open_fresh(url: str) -> None:
    """Open a database at the same moment as others."""
    say("ready")
    sys.stdin.readline()
    with open_storage(url) as storage:
        say(str(len(storage.get_all_studies())))


def write_through(url: str, trials: str) -> None:
    """Run trials in a study that others write too."""
    with open_storage(url) as storage:
        study = load(storage, "shared")
        say("ready")
        sys.stdin.readline()
        for _ in range(int(trials)):
            run_trial(study)
    say("done")


def write_batches(url: str) -> None:
    """Run trials in a study of one's own until killed, with a flush for each."""
    with open_storage(url) as storage, storage.batching():
        study = load(storage, "own")
        while True:
            say(str(run_and_record(study, storage)))


def die_in_flush(url: str, statement: str) -> None:
    """Flush one trial, then die just before the given statement of the second flush."""
    storage = open_storage(url)
    storage.begin_batching()
    study = load(storage, "own")
    say(str(run_and_record(study, storage)))
    sent = count(1)

    def die(*_: object) -> None:
        if next(sent) == int(statement):
            os.kill(os.getpid(), signal.SIGKILL)

    sqlalchemy.event.listen(storage._engine, "before_cursor_execute", die)
    sqlalchemy.event.listen(storage._engine, "commit", die)
    run_and_record(study, storage)
    storage.close()
    say("survived")


def load(storage: HydraStorage, name: str) -> optuna.Study:
    sampler = optuna.samplers.RandomSampler(seed=0)
    return optuna.create_study(study_name=name, storage=storage, sampler=sampler, load_if_exists=True)


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    commands: dict[str, Callable[..., None]] = {
        "open_fresh": open_fresh,
        "write_through": write_through,
        "write_batches": write_batches,
        "die_in_flush": die_in_flush,
    }
    commands[sys.argv[1]](*sys.argv[2:])
