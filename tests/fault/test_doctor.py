"""`doctor` after crashes: it finds leftover files and leases, and names the remedy."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.fault.searches import COMMON, SPEC, kill_and_reap, run, started, wait_for_checkpoint


def doctor(folder: Path) -> tuple[int, dict[str, Any]]:
    done = run("doctor", "--json", folder=folder)
    return done.returncode, json.loads(done.stdout)["database"]


def test_what_a_killed_search_left_is_found_and_gone_after_resuming(tmp_path: Path) -> None:
    # Not in the place that all searches share: one of another test would remove what is left.
    spill = tmp_path / "spill"
    spill.mkdir()
    flags = [*COMMON, "--trials", "1", "--study", "s", "--spill", str(spill)]
    with started("search", f"{SPEC}:build", *flags, folder=tmp_path) as search:
        wait_for_checkpoint(tmp_path)
        kill_and_reap(search)
    orphan = tmp_path / "hydra_tune_files" / "study-77"
    orphan.mkdir()
    code, found = doctor(tmp_path)
    assert (code, found["ok"]) == (0, True)
    advice = "\n".join(found["advice"])
    assert f"study 's' was left by process {search.pid} on " in advice
    assert f"{orphan} belongs to no study or running trial: delete it" in advice
    assert f"hydra-tune-search-{search.pid}-" in advice
    assert "was left by a killed search: the next search removes it" in advice
    assert ".checkpoints belongs" not in advice, "those of a trial that goes on are needed"
    orphan.rmdir()
    assert run("resume", "s", folder=tmp_path).returncode == 0
    advice = "\n".join(doctor(tmp_path)[1]["advice"])
    assert f"process {search.pid} " not in advice
    assert f"hydra-tune-search-{search.pid}-" not in advice


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("def build(trial):\n    return trial.suggest_float('x', 0, 1)\n")
    assert run("search", "b.py:build", "--trials", "20", "--devices", "1xcpu", folder=tmp_path).returncode == 0
    database = tmp_path / "hydra_tune.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page = connection.execute("PRAGMA page_size").fetchone()[0]
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'hydra_units'").fetchone()[0]
    data = bytearray(database.read_bytes())
    data[(root - 1) * page : root * page] = b"\xff" * page
    database.write_bytes(data)
    code, found = doctor(tmp_path)
    assert code == 2
    assert not found["ok"]
    assert "damaged" in json.dumps(found) or "malformed" in json.dumps(found)
    assert "restore a backup" in json.dumps(found)
