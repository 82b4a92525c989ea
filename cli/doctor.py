"""`hydra-tune doctor`: checks this machine and a database for a search."""

from __future__ import annotations

import platform
import shutil
from typing import Annotated, Any

import typer

from hydra_tune.cli.options import Json, Storage

PACKAGES = (
    "torch",
    "optuna",
    "sqlalchemy",
    "alembic",
    "safetensors",
    "cloudpickle",
    "pytorch-lightning",
    "psycopg",
)


def doctor(
    storage: Storage = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure the speed of computing and of moving bytes, for plans.")
    ] = False,
    devices: Annotated[
        bool, typer.Option("--devices", help="Train a small model with each strategy on each device, and compare.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Check every node of a Ray cluster too: auto, or HOST:PORT.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Check devices, memory, versions and the database."""
    from hydra_tune.cli.tables import print_json
    from hydra_tune.coordinator.settings import default_storage

    report = {
        **_machine(),
        "rates": _rates(calibrate),
        "packages": _versions(),
        "database": _database(storage or default_storage()),
        **({"checks": _checks()} if devices else {}),
    }
    if cluster is not None:
        report["nodes"] = _nodes(cluster)
    if as_json:
        print_json(report)
    else:
        _print(report)
    checked = [*report.get("checks", ()), *report.get("nodes", ())]
    return 0 if report["database"]["ok"] and all(each["ok"] for each in checked) else 2


def _nodes(cluster: str) -> list[dict[str, Any]]:
    """Return the state of each node of a cluster."""
    from dataclasses import asdict

    from hydra_tune.cluster.doctor import examine_cluster
    from hydra_tune.coordinator import checks

    checks.cluster("cluster", cluster)
    return [{"ok": node.ok, **asdict(node)} for node in examine_cluster(cluster)]


def _machine() -> dict[str, Any]:
    import psutil

    from hydra_tune.coordinator.run_directories import SHARED_MEMORY
    from hydra_tune.core.devices import cores, format_bytes, parse_devices

    memory = psutil.virtual_memory()
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return {
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "cores": cores(),
        "memory": f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}",
        "shared_memory": f"{format_bytes(shared)} free",
        "devices": [f"{d.name} ({format_bytes(d.memory)}, {d.threads} threads)" for d in parse_devices("auto")],
    }


def _rates(calibrate: bool) -> dict[str, float]:
    """Return the machine's rates used for plans; empty if none were measured yet (a search measures when needed)."""
    from dataclasses import asdict
    from pathlib import Path
    from tempfile import gettempdir

    from hydra_tune.coordinator.run_directories import SHARED_MEMORY
    from hydra_tune.core.devices import parse_devices
    from hydra_tune.planner.rates import known_rates

    found = known_rates()
    if calibrate:
        from hydra_tune.planner import calibration

        disk = Path(gettempdir())
        host = SHARED_MEMORY if SHARED_MEMORY.is_dir() else disk
        found = calibration.calibrate(host, disk, len(parse_devices("auto")))
    return {} if found is None else asdict(found)


def _checks() -> list[dict[str, Any]]:
    """Return what was found on each device, with a verdict."""
    from dataclasses import asdict

    from hydra_tune.coordinator.device_check import check_devices

    return [{**asdict(verdict), "ok": verdict.ok} for verdict in check_devices()]


def _said_check(check: dict[str, Any]) -> str:
    strategies = ", ".join(f"{name} {said}" for name, said in check["strategies"].items())
    measured = ", ".join(
        f"{name.replace('_bytes_per_second', '').replace('_', ' ')} "
        + (f"{value / 1e9:.1f} GB/s" if name.endswith("_per_second") else str(value))
        for name, value in check["measured"].items()
    )
    return f"{check['device']} {'ok' if check['ok'] else 'NOT OK'}: {strategies}; {measured}"


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _database(url: str) -> dict[str, Any]:
    """Return the database's state of health, with remedies for problems."""
    from hydra_tune.core.errors import StorageError
    from hydra_tune.storage import open_storage
    from hydra_tune.storage.database import masked
    from hydra_tune.storage.queries import list_studies

    shown = masked(url)
    try:
        with open_storage(url, read_only=True) as opened:
            studies = list_studies(opened)
            advice = [*_integrity(opened), *_stale_leases(opened, studies), *_orphan_files(url, opened, studies)]
            kind = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}.get(opened.engine.dialect.name, "MySQL")
    except StorageError as error:
        absent = "a search creates it" in error.hint
        return {"url": shown, "ok": absent, "says": str(error), "advice": []}
    trials = sum(sum(summary.trials.values()) for summary in studies)
    says = f"{kind}, {len(studies)} studies, {trials} trials"
    return {"url": shown, "ok": not any("damaged" in line for line in advice), "says": says, "advice": advice}


def _integrity(opened: Any) -> list[str]:
    """Return the problems that SQLite itself finds in the file."""
    from hydra_tune.storage.database import sqlite_path

    if sqlite_path(opened.engine) is None:
        return []
    with opened.reading() as connection:
        found = [row[0] for row in connection.exec_driver_sql("PRAGMA integrity_check(5)")]
    return [] if found == ["ok"] else [f"the file is damaged ({'; '.join(found)}): restore a backup"]


def _stale_leases(opened: Any, studies: list[Any]) -> list[str]:
    from hydra_tune.storage.leases import read_leases

    if not opened.has_hydra_tables:
        return []
    names = {summary.study_id: summary.name for summary in studies}
    with opened.reading() as connection:
        leases = read_leases(connection)
    return [
        f"study {names.get(lease.study_id, '?')!r} was left by process {lease.pid} on {lease.host}: resume it"
        for lease in leases
        if not lease.held()
    ]


def _orphan_files(url: str, opened: Any, studies: list[Any]) -> list[str]:
    """Return files of studies or trials that are no longer in the database, and of killed searches."""
    from pathlib import Path
    from tempfile import gettempdir

    from optuna.trial import TrialState

    from hydra_tune.coordinator.files import StudyFiles, files_directory
    from hydra_tune.coordinator.run_directories import SHARED_MEMORY, abandoned_directories

    files = {summary.study_id: StudyFiles.of(url, summary.study_id, summary.settings) for summary in studies}
    known = {place.directory for place in files.values()}
    places = {files_directory(url), *(directory.parent for directory in known)}
    orphans = [entry for place in places for entry in place.glob("study-*") if entry not in known]
    for study_id, place in files.items():
        running = {t.number for t in opened.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,))}
        orphans += [place.checkpoints(number) for number in place.checkpointed() if number not in running]
    advice = [f"{entry} belongs to no study or running trial: delete it" for entry in orphans]
    spills = {Path(summary.settings["spill"]) for summary in studies if summary.settings.get("spill")}
    left = [entry for at in spills | {SHARED_MEMORY, Path(gettempdir())} for entry in abandoned_directories(at)]
    return [*advice, *(f"{entry} was left by a killed search: the next search removes it" for entry in left)]


def _said_rates(rates: dict[str, float]) -> str:
    if not rates:
        return "not measured yet; a search measures them when needed, --calibrate measures them now"
    crowding = rates["crowding"]
    gigabytes = {name: f"{rate / 1e9:.1f} GB/s" for name, rate in rates.items() if name not in ("compute", "crowding")}
    moves = ", ".join(f"{name.replace('_', ' ')} {rate}" for name, rate in gigabytes.items())
    return (
        f"{rates['compute'] / 1e9:.0f} GFLOP/s a core, {moves}; work takes {crowding:.2f} times as long on all devices"
    )


def _print(report: dict[str, Any]) -> None:
    from hydra_tune.core.errors import printable

    for name, value in report.items():
        if name == "devices":
            value = "; ".join(value)
        elif name == "packages":
            value = ", ".join(f"{package} {version}" for package, version in value.items())
        elif name == "rates":
            value = _said_rates(value)
        elif name == "nodes":
            value = "\n  ".join(["", *(node["says"] for node in value)])
        elif name == "database":
            advice = value["advice"]
            value = f"{value['url']}: {'ok' if value['ok'] else 'NOT OK'}, {value['says']}"
            value = "\n  ".join([value, *advice])
        elif name == "checks":
            value = "\n  ".join(["", *map(_said_check, value)])
        typer.echo(printable(f"{name.replace('_', ' ')}: {value}"))
