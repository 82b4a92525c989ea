"""Time until a study's page is usable, with 1,000, 10,000 and 50,000 trials of 100 reports each.

A real browser opens a study's page on a freshly started server, and again once the study has been read: the time is
from the request until the best value and the first rows of the leaderboard are readable. Then every GET route is
requested repeatedly. optuna-dashboard gets the same browser and database; its time is until the study's name is
readable, which comes with its trials. The databases are made in build/ and reused.
"""

from __future__ import annotations

import http.client
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, TimeoutError, sync_playwright

from benchmarks.many_trials import write_study
from benchmarks.report import arguments, finish, interleaved, ratios, spread

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
REPORTS = 100
PATHS = (
    "/api/studies", "/api/studies/1", "/api/studies/1/trials", "/api/studies/1/trials?sort=lr&offset=500",
    "/api/studies/1/trials?filter=state:failed%20lr%3C0.01", "/api/studies/1/trials/7", "/api/studies/1/history",
    "/api/studies/1/reports", "/api/studies/1/sample", "/api/studies/1/importances", "/api/studies/1/failures",
    "/api/studies/1/devices", "/api/studies/1/timeline", "/api/studies/1/timeline?start=1767225600&end=1767226600",
)  # fmt: skip
GIVE_UP = 150.0
"""Seconds after which waiting for a page stops; the ratio is then a lower bound."""


def database(trials: int) -> Path:
    """Return the file with `trials` trials; create it if missing."""
    path = Path("build/benchmarks").absolute() / f"{trials}-trials.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        print(f"making {path}", file=sys.stderr, flush=True)
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        write_study(f"sqlite:///{part}", f"{trials} trials", trials, REPORTS)
        part.rename(path)
    return path


@contextmanager
def served(*command: str, says: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run a server process; yield its address and the process."""
    server = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = None
        for line in server.stdout:
            address = re.search(r"http://[0-9.:]+/", line) or address
            if says in line:
                break
        assert address, "the server did not start"
        yield address[0], psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait()


@contextmanager
def ours(path: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = (sys.executable, "-m", "hydra_tune", "dashboard", "--storage", f"sqlite:///{path}", "--port", "0")
    with served(*command, says="Ctrl-C") as found:
        yield found


@contextmanager
def theirs(path: Path) -> Iterator[tuple[str, psutil.Process]]:
    program = "from optuna_dashboard._cli import main; main()"
    place = (f"sqlite:///{path}", "--host", "127.0.0.1", "--port", "8199")
    with served(sys.executable, "-u", "-c", program, *place, says="Ctrl-C") as found:
        yield found


def seconds_to_read(page: Page, address: str, selector: str) -> float:
    """Return the seconds from requesting a page until the selected element is visible."""
    began = time.perf_counter()
    page.goto(address, wait_until="commit")
    try:
        page.locator(selector).first.wait_for(timeout=1000 * GIVE_UP)
    except TimeoutError:
        print(f"{address} was given up", file=sys.stderr)
        return GIVE_UP
    return time.perf_counter() - began


def visit_ours(address: str, browser: Any) -> float:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        return seconds_to_read(context.new_page(), f"{address}studies/1", "#leaderboard tr[data-trial] td")
    finally:
        context.close()


def visit_theirs(address: str, browser: Any) -> float:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        return seconds_to_read(context.new_page(), f"{address}dashboard/studies/1", "text=/\\(id=1\\)/")
    finally:
        context.close()


def latencies(address: str, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each route, requested in turn."""
    host = address.removeprefix("http://").rstrip("/")
    found: dict[str, list[float]] = {path: [] for path in PATHS}
    connection = http.client.HTTPConnection(host, timeout=60)
    for _ in range(rounds):
        for path in PATHS:
            began = time.perf_counter()
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, path
            found[path].append(1000 * (time.perf_counter() - began))
    connection.close()
    return found


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def measure(trials: int, rounds: int, browser: Any, document: dict[str, Any]) -> list[tuple[str, str]]:
    path = database(trials)
    first, later = [], []
    for _ in range(rounds):
        with ours(path) as (address, process):
            first.append(visit_ours(address, browser))
            later.append(visit_ours(address, browser))
            asked = latencies(address, 10)
            megabytes = process.memory_info().rss / 2**20
    everything = [value for values in asked.values() for value in values]
    slowest = max(asked, key=lambda path: p95(asked[path]))
    document[f"study_page_seconds_{trials}"] = round(statistics.median(first), 3)
    document[f"study_page_seconds_{trials}_later"] = round(statistics.median(later), 3)
    document[f"server_mib_{trials}"] = round(megabytes)
    document["api_p95_ms"] = round(p95(everything), 1)
    return [
        (f"{trials} trials: page right after the server's start, s", spread(first)),
        (f"{trials} trials: page later, s", spread(later)),
        (
            f"{trials} trials: API p95, ms",
            f"{p95(everything):.1f}; slowest route {p95(asked[slowest]):.1f} ({slowest})",
        ),
        (f"{trials} trials: server's memory, MiB", f"{megabytes:.0f}"),
    ]


def against_optuna_dashboard(trials: int, rounds: int, browser: Any, document: dict[str, Any]) -> list[tuple[str, str]]:
    """Compare both on one database, each visit on a freshly started server."""
    path = database(trials)

    def one(serve: Any, visit: Any) -> float:
        with serve(path) as (address, _):
            return float(visit(address, browser))

    systems = {"ours": lambda: one(ours, visit_ours), "theirs": lambda: one(theirs, visit_theirs)}
    measured = interleaved(systems, rounds)
    times = ratios(measured["theirs"], measured["ours"])
    document[f"vs_optuna_dashboard_{trials}"] = round(statistics.median(times), 1)
    return [
        (f"{trials} trials: optuna-dashboard, s", spread(measured["theirs"])),
        (f"{trials} trials: Hydra Tune beside it, s", spread(measured["ours"])),
        (f"{trials} trials: times faster", spread(times)),
    ]


def main() -> None:
    options = arguments(__doc__ or "")
    sizes = (100, 1_000) if options.quick else (1_000, 10_000, 50_000)
    rounds = options.rounds or (1 if options.quick else 3)
    rows: list[tuple[str, str]] = []
    document: dict[str, Any] = {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        for trials in sizes:
            rows += measure(trials, rounds, browser, document)
            print(*(f"{name}: {value}" for name, value in rows[-4:]), sep="\n", file=sys.stderr, flush=True)
        peer = sizes[-1] if options.quick else 10_000
        rows += against_optuna_dashboard(peer, rounds, browser, document)
        browser.close()
    finish(rows, document)


if __name__ == "__main__":
    main()
