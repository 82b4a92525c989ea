"""Live updates of a search in another process: its changes and its end are sent."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

from tests.dashboard.conftest import serving
from tests.dashboard.searches import searching, until
from tests.dashboard.test_actions import _made


def _follow(address: str, stop: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream until one of this name."""
    found: list[tuple[str, dict[str, Any]]] = []
    with urllib.request.urlopen(f"{address}api/studies/1/live") as stream:
        name = ""
        for raw in stream:
            line = raw.decode().rstrip("\n")
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
                if name == stop:
                    break
    return found


def test_a_running_search_is_told_as_it_goes_and_ends(tmp_path: Path) -> None:
    with searching(tmp_path, "slow_objective", "--trials", "4"):
        until(lambda: _made(tmp_path))
        with serving("--storage", "sqlite:///live.db", cwd=tmp_path) as (address, _):
            events = _follow(address, "end")
    changes = [news for name, news in events if name == "change"]
    assert len(changes) > 1
    versions = [news["study"]["version"] for news in changes]
    assert versions == sorted(versions)
    finished = [news["study"]["finished"] for news in changes]
    assert finished == sorted(finished)
    assert finished[-1] == 4
    # Only what changed is sent: no finished trial comes twice.
    ended = [row["number"] for news in changes for row in news["trials"] if row["state"] == "COMPLETE"]
    assert sorted(ended) == [0, 1, 2, 3]
    assert events[-1] == ("end", {"state": "finished"})


def test_the_server_ends_although_somebody_listens(tmp_path: Path, url: str) -> None:
    heard = threading.Event()

    def listen(address: str) -> None:
        with urllib.request.urlopen(f"{address}api/studies/4/live") as stream:
            stream.readline()
            heard.set()
            stream.read()

    with serving("--storage", url, cwd=tmp_path) as (address, _):
        listener = threading.Thread(target=listen, args=(address,))
        listener.start()
        assert heard.wait()
    # `serving` has asked the server to end and waited for it.
    listener.join()
