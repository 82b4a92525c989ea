"""`hydra-tune best STUDY`: the best trial and its parameters."""

from __future__ import annotations

from hydra_tune.cli.options import Json, Storage, Study


def best(study: Study, storage: Storage = None, as_json: Json = False) -> int:
    """Show the best trial of a study; with several objectives, the Pareto front."""
    import optuna
    from optuna.trial import TrialState

    from hydra_tune.cli.show import files_kept, print_files, print_trial
    from hydra_tune.cli.tables import plain, print_json, print_table, trials_table
    from hydra_tune.coordinator.settings import default_storage
    from hydra_tune.core.errors import SearchFailed
    from hydra_tune.storage import open_storage
    from hydra_tune.storage.queries import study_summary, trial_records

    with open_storage(storage or default_storage(), read_only=True) as opened:
        summary = study_summary(opened, study)
        records = trial_records(opened, study)
        loaded = optuna.load_study(study_name=study, storage=opened)
        if not loaded.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            raise SearchFailed(f"no trial of study {study!r} has completed", "`hydra-tune trials` shows why")
        several = len(summary.directions) > 1
        if not loaded.best_trials:
            raise SearchFailed(f"no completed trial of study {study!r} satisfies its constraints", "look at trials")
        numbers = [t.number for t in loaded.best_trials] if several else [loaded.best_trial.number]
    chosen = [records[number] for number in numbers]
    kept = {number: files_kept(storage or default_storage(), summary, number) for number in numbers}
    if as_json:
        found = [{**plain(record), "files": kept[record.number]} for record in chosen]
        print_json(found if several else found[0])
    elif several:
        print_table(trials_table(chosen, summary.metrics))
        print_files([path for number in numbers for path in kept[number]])
    else:
        print_trial(chosen[0], summary.metrics)
        print_files(kept[numbers[0]])
    return 0
