"""optuna-dashboard, as a real server, reads a database of ours."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import hydra_tune as ht
from tests.candidates import build_small

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")


def get(address: str, server: subprocess.Popen[bytes]) -> Any:
    """A page as JSON; waits for a server that is still starting."""
    while True:
        try:
            with urllib.request.urlopen(address) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            assert server.poll() is None, "the server ended"
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_optuna_dashboard_shows_a_study(tmp_path: Path) -> None:
    ht.search(build_small, trials=2, study="seen", devices="2xcpu", progress=False)
    port = str(free_port())
    command = [str(Path(sys.executable).with_name("optuna-dashboard")), "sqlite:///hydra_tune.db"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", port], stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        api = f"http://127.0.0.1:{port}/api/studies"
        (study,) = get(api, server)["study_summaries"]
        assert study["study_name"] == "seen"
        detail = get(f"{api}/{study['study_id']}?after=0", server)
        assert [trial["state"] for trial in detail["trials"]] == ["Complete", "Complete"]
        assert detail["trials"][0]["params"][0]["name"] == "lr"
    finally:
        server.kill()
        server.wait()
