"""`hydra-tune doctor`: what this machine and this database look like to a search."""

from __future__ import annotations

import platform
import shutil
from typing import Any

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


def doctor(storage: Storage = None, as_json: Json = False) -> int:
    """Check devices, memory, versions and the database."""
    from hydra_tune.cli.tables import print_json
    from hydra_tune.settings import default_storage

    report = {**_machine(), "packages": _versions(), "database": _database(storage or default_storage())}
    if as_json:
        print_json(report)
    else:
        _print(report)
    return 0 if report["database"]["ok"] else 2


def _machine() -> dict[str, Any]:
    import psutil

    from hydra_tune.devices import cores, format_bytes, parse_devices
    from hydra_tune.files import SHARED_MEMORY

    memory = psutil.virtual_memory()
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return {
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "cores": cores(),
        "memory": f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}",
        "shared_memory": f"{format_bytes(shared)} free",
        "devices": [f"{d.name} ({format_bytes(d.memory)}, {d.threads} threads)" for d in parse_devices("auto")],
    }


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
    from hydra_tune.errors import StorageError
    from hydra_tune.storage import open_storage
    from hydra_tune.storage.database import masked
    from hydra_tune.storage.queries import list_studies

    shown = masked(url)
    try:
        with open_storage(url, read_only=True) as opened:
            studies = list_studies(opened)
    except StorageError as error:
        absent = "search creates" in str(error)
        return {"url": shown, "ok": absent, "says": str(error)}
    trials = sum(sum(summary.trials.values()) for summary in studies)
    return {"url": shown, "ok": True, "says": f"{len(studies)} studies, {trials} trials"}


def _print(report: dict[str, Any]) -> None:
    for name, value in report.items():
        if name == "devices":
            value = "; ".join(value)
        elif name == "packages":
            value = ", ".join(f"{package} {version}" for package, version in value.items())
        elif name == "database":
            value = f"{value['url']}: {'ok' if value['ok'] else 'NOT OK'}, {value['says']}"
        typer.echo(f"{name.replace('_', ' ')}: {value}")
