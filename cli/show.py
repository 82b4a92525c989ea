"""`hydra-tune show STUDY [TRIAL]`: a study at a glance, or everything about one trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydra_tune.cli.options import Json, Storage, Study

if TYPE_CHECKING:
    from hydra_tune.storage.queries import StudySummary, TrialRecord


def show(
    study: Study,
    trial: Annotated[int | None, typer.Argument(help="Number of a trial.")] = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show a study, or one of its trials."""
    from hydra_tune.coordinator.settings import default_storage
    from hydra_tune.storage import open_storage

    with open_storage(storage or default_storage(), read_only=True) as opened:
        if trial is None:
            _show_study(opened, study, as_json)
        else:
            _show_trial(opened, storage or default_storage(), study, trial, as_json)


def _show_study(opened: Any, study: str, as_json: bool) -> None:
    from hydra_tune.cli.tables import leaderboard, plain, print_json, print_table
    from hydra_tune.core.errors import printable
    from hydra_tune.storage.queries import study_summary, trial_records

    summary = study_summary(opened, study)
    records = trial_records(opened, study)
    if as_json:
        print_json({**plain(summary), "records": records})
        return
    states = ", ".join(f"{count} {state.lower()}" for state, count in summary.trials.items()) or "no trials"
    objectives = ", ".join(f"{d} {m}" for m, d in zip(summary.metrics, summary.directions, strict=False))
    typer.echo(f"study {printable(summary.name)}: {objectives}; {states}")
    settings = summary.settings or {}
    facts = {name: settings[name] for name in ("devices", "strategy", "sampler", "pruner") if settings.get(name)}
    if summary.seed is not None:
        facts["seed"] = summary.seed
    if facts:
        typer.echo(printable(", ".join(f"{name} {value}" for name, value in facts.items())))
    print_table(leaderboard(records, summary.metrics, summary.directions))


def _show_trial(opened: Any, url: str, study: str, trial: int, as_json: bool) -> None:
    from hydra_tune.cli.plans import print_plan
    from hydra_tune.cli.tables import plain, print_json
    from hydra_tune.core.errors import InputError, printable
    from hydra_tune.storage.queries import (
        study_summary,
        trial_attempts,
        trial_metrics,
        trial_notes,
        trial_records,
        trial_units,
    )

    summary = study_summary(opened, study)
    records = trial_records(opened, study)
    if not 0 <= trial < len(records):
        there = f"it has trials 0 to {len(records) - 1}" if records else "it has no trials yet"
        raise InputError(f"study {study!r} has no trial {trial}", there)
    curves = trial_metrics(opened, study, trial)
    attempts = trial_attempts(opened, study, trial)
    units = trial_units(opened, study, trial)
    notes = trial_notes(opened, study, trial)
    kept = files_kept(url, summary, trial)
    if as_json:
        events = [{"kind": kind, "message": message} for kind, message in notes]
        print_json({
            **plain(records[trial]), "metrics": curves, "attempts": attempts, "units": units, "events": events,
            "files": [str(path) for path in kept],
        })  # fmt: skip
        return
    print_trial(records[trial], summary.metrics)
    print_files(kept)
    print_plan(records[trial].strategy, records[trial].plan)
    _print_curves(curves)
    _print_units(units, objective=not records[trial].strategy)
    for kind, message in notes:
        typer.echo(printable(f"{kind}: {message}"))
    _print_attempts(attempts)


def print_trial(record: TrialRecord, metrics: Sequence[str]) -> None:
    """Print a trial's facts and parameters."""
    from hydra_tune.core.devices import format_bytes
    from hydra_tune.core.errors import printable

    typer.echo(f"trial {record.number}: {record.state}")
    for metric, value in zip(metrics, record.values or [], strict=False):
        typer.echo(printable(f"  {metric}: {value:.6g}"))
    if record.error:
        typer.echo(printable(f"  error: {record.error}"))
    facts = [
        ("strategy", record.strategy), ("shards", record.shards if record.strategy else None),
        ("device", record.device), ("seed", record.seed),
        ("seconds", None if record.seconds is None else f"{record.seconds:.2f}"),
        ("peak memory", None if record.peak_device_bytes is None else format_bytes(record.peak_device_bytes)),
        ("spilled at most", None if not record.spilled_bytes else format_bytes(record.spilled_bytes)),
        ("written there", None if not record.spill_written_bytes else format_bytes(record.spill_written_bytes)),
        ("read back", None if not record.spill_read_bytes else format_bytes(record.spill_read_bytes)),
        ("communicated", None if not record.communicated_bytes else format_bytes(record.communicated_bytes)),
    ]  # fmt: skip
    typer.echo("  " + ", ".join(f"{name} {value}" for name, value in facts if value not in (None, "")))
    typer.echo("parameters:")
    for name, value in record.params.items():
        typer.echo(printable(f"  {name}: {value}"))
    attrs = {name: value for name, value in record.user_attrs.items() if name != "lightning"}
    if attrs:
        typer.echo("attributes:")
    for name, value in attrs.items():
        typer.echo(printable(f"  {name}: {value}"))


def files_kept(url: str, summary: StudySummary, trial: int) -> list[Path]:
    """Return what a trial has kept with `trial.keep`."""
    from hydra_tune.coordinator.files import StudyFiles
    from hydra_tune.training.kept_files import kept_files

    return kept_files(StudyFiles.of(url, summary.study_id, summary.settings or {}).kept(trial))


def print_files(kept: Sequence[Path]) -> None:
    """Print the paths of what a trial has kept."""
    from hydra_tune.core.errors import printable

    if kept:
        typer.echo("files:")
    for path in kept:
        typer.echo(printable(f"  {path}"))


def _print_curves(curves: dict[int, dict[str, float]]) -> None:
    from hydra_tune.cli.tables import number, print_table
    from hydra_tune.core.tables import Table

    if not curves:
        return
    names = sorted({name for metrics in curves.values() for name in metrics})
    # An objective reports its own steps, which begin anywhere; epochs are counted from one.
    unit, first = ("step", 0) if names == ["reported"] else ("epoch", 1)
    table = Table([unit, *names], numeric=frozenset({unit, *names}))
    for epoch, metrics in sorted(curves.items()):
        table.rows.append([str(epoch + first), *(number(metrics.get(name)) for name in names)])
    print_table(table)


def _print_units(units: Sequence[Any], *, objective: bool) -> None:
    from hydra_tune.cli.tables import print_table
    from hydra_tune.core.tables import Table

    if not units:
        return
    kinds: dict[tuple[str, str], list[Any]] = {}
    for unit in units:
        kinds.setdefault((unit.kind, unit.device), []).append(unit)
    moved = any(unit.shard is not None for unit in units)
    table = Table(["work", "device", "units", "seconds", *(["read", "written"] if moved else [])])
    for (kind, device), some in kinds.items():
        count, seconds = sum(unit.steps or 1 for unit in some), sum(unit.seconds for unit in some)
        row = ["objective" if objective and kind == "build" else kind, device, str(count), f"{seconds:.2f}"]
        if moved:
            row += [_bytes(sum(unit.read_bytes or 0 for unit in some)), _bytes(sum(u.written_bytes or 0 for u in some))]
        table.rows.append(row)
    print_table(table)


def _bytes(count: int) -> str:
    from hydra_tune.core.devices import format_bytes

    return format_bytes(count) if count else ""


def _print_attempts(attempts: Sequence[Any]) -> None:
    from hydra_tune.core.errors import printable

    for attempt in attempts:
        if attempt.error or len(attempts) > 1:
            typer.echo(printable(f"attempt {attempt.attempt}: {attempt.state} {attempt.error or ''}".rstrip()))
        if attempt.traceback:
            typer.echo(printable(attempt.traceback.rstrip()))
