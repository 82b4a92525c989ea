"""The dashboard in a real browser: every page, live, sorted, filtered, compared, acted on; hostile names stay text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydra_tune.cli.app import run
from hydra_tune.storage import StudyRecords, open_storage
from tests.dashboard.conftest import filled as filled
from tests.dashboard.conftest import serving
from tests.dashboard.conftest import url as url
from tests.dashboard.searches import searching, until
from tests.dashboard.studies import HOSTILE
from tests.dashboard.test_actions import _made

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next((path for path in map(Path, ("/usr/bin/chromium", "/usr/bin/chromium-browser")) if path.exists()), None)
if CHROMIUM is None:
    pytest.skip("chromium is not installed (apt-get install chromium)", allow_module_level=True)

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DRAWN = "[...document.querySelectorAll('.plot')].filter((e) => e.offsetParent).every((e) => e.dataset.drawn)"


class Visitor:
    """A browser's page that remembers what went wrong on it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.troubles: list[str] = []
        page.set_default_timeout(300_000)  # against hanging
        page.on("console", lambda message: message.type in ("error", "warning") and self.troubles.append(message.text))
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("dialog", lambda dialog: self.troubles.append(f"dialog: {dialog.message}") or dialog.dismiss())
        page.on("request", lambda request: self._same_site(request.url))

    def _same_site(self, url: str) -> None:
        if not url.startswith((self.address, "data:", "blob:")):
            self.troubles.append(f"asked {url}")

    def open(self, path: str) -> Any:
        self.page.goto(self.address.rstrip("/") + path)
        return self.page

    def see_all(self) -> None:
        """Let the whole page come into view, and wait for every chart."""
        self.page.set_viewport_size({"width": 1280, "height": 7_000})
        self.wait(DRAWN)

    def wait(self, expression: str) -> None:
        """Until it is true. Playwright's own waiting evaluates text in the page, which the page's policy forbids."""
        until(lambda: self.page.evaluate(expression))


@pytest.fixture
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def visitor(browser: Any, url: str, tmp_path: Path) -> Iterator[Visitor]:
    """A visitor of a server on the filled database; fails where the browser complained of anything."""
    with serving("--storage", url, cwd=tmp_path) as (address, _):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        found = Visitor(context.new_page(), address)
        yield found
        context.close()
        assert not found.troubles


def test_studies_lead_to_studies_and_their_best_trials(visitor: Visitor) -> None:
    page = visitor.open("/")
    rows = page.locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 4
    assert page.title() == "Hydra Tune"
    troubled = page.locator("tr", has_text="troubled")
    assert "6/6" in troubled.inner_text()
    troubled.get_by_role("link", name="troubled").click()
    page.get_by_role("heading", name="troubled").wait_for()
    assert page.url.endswith("/studies/1")


def test_the_study_page_says_what_was_searched_and_what_won(visitor: Visitor) -> None:
    page = visitor.open("/studies/1")
    page.locator("#leaderboard tbody tr").first.wait_for()
    best = page.locator("#leaderboard tbody tr").first.get_attribute("data-trial")
    assert f"trial {best}" in page.locator(".facts").inner_text()
    visitor.wait("document.querySelector('.facts').innerText.includes('Devices busy')")
    assert re.search(r"Devices busy\s+[\d.]+%\s+2 devices", page.locator(".facts").inner_text())
    won = page.locator("section", has=page.get_by_role("heading", name="What won")).inner_text()
    assert "activation" in won
    visitor.see_all()
    for chart in ("history", "intermediate-values", "parameter-importances", "slices"):
        visitor.wait(f"document.querySelectorAll('#{chart} .plot svg').length > 0")
    assert page.locator("#parallel-coordinates canvas").is_visible()
    assert "from a traceback" in page.locator("#failures").inner_text()


def test_the_pareto_front_of_several_objectives(visitor: Visitor) -> None:
    page = visitor.open("/studies/2")
    page.locator("#pareto-front .plot svg").first.wait_for()
    assert "that no other beats" in page.locator("#pareto-front").inner_text()


def _column(page: Any, heading: str) -> list[str]:
    heads = [text.strip() for text in page.locator("#leaderboard th").all_inner_texts()]
    index = next(i for i, text in enumerate(heads) if text.split(" ")[0] == heading)
    return [cell.strip() for cell in page.locator(f"#leaderboard tbody td:nth-child({index + 1})").all_inner_texts()]


def test_the_leaderboard_sorts_filters_and_turns_pages(visitor: Visitor) -> None:
    page = visitor.open("/studies/4")
    board = page.locator("#leaderboard")
    board.locator("tbody tr").first.wait_for()
    values = [float(text) for text in _column(page, "accuracy")]
    assert len(values) == 50
    assert values == sorted(values, reverse=True)
    page.get_by_role("button", name="lr", exact=True).click()
    page.locator("th[aria-sort=ascending]", has_text="lr").wait_for()
    rates = [float(text) for text in _column(page, "lr")]
    assert rates == sorted(rates)
    page.get_by_role("searchbox").fill("state:failed depth>=7")
    visitor.wait("document.querySelectorAll('#leaderboard tbody tr').length < 50")
    assert set(_column(page, "State")) == {"Failed"}
    assert {int(text) for text in _column(page, "depth")} <= {7, 8}
    page.get_by_role("searchbox").fill("dpeth>3")
    board.get_by_role("alert").filter(has_text="did you mean 'depth'").wait_for()
    page.get_by_role("searchbox").fill("")
    visitor.wait("document.querySelectorAll('#leaderboard tbody tr').length === 50")
    page.get_by_role("button", name="Next").click()
    visitor.wait("document.querySelector('#leaderboard header').innerText.includes('51\u2013100 of 600')")
    assert "sort=lr" in page.url
    # What the address says is what is shown after a reload.
    visitor.troubles.clear()  # the browser's own line about the 422 above
    page.reload()
    visitor.wait("document.querySelector('#leaderboard header')?.innerText.includes('51\u2013100 of 600')")


def test_trials_side_by_side(visitor: Visitor) -> None:
    page = visitor.open("/studies/1")
    for number in (0, 1, 3):
        page.get_by_label(f"Compare trial {number}", exact=True).check()
    page.get_by_role("button", name="Compare 3").click()
    page.get_by_role("heading", name="Trials 0, 1, 3").wait_for()
    visitor.see_all()
    assert page.locator("td.differs").count() >= 3
    assert page.locator(".plot svg").count() > 0
    visitor.open("/studies/1/compare?trials=1")
    page.get_by_text("Choose two to five").wait_for()


def test_a_trial_with_curves_and_one_with_a_traceback(visitor: Visitor) -> None:
    page = visitor.open("/studies/1/trials/0")
    page.get_by_role("heading", name="Trial 0").wait_for()
    visitor.see_all()
    assert page.locator(".plot svg").count() >= 2
    text = page.locator("main").inner_text()
    for part in ("Parameters", "whole", "Units of work", "Memory against the budget", "Attempts"):
        assert part in text, part
    page.get_by_role("link", name="Next").click()
    page.get_by_role("heading", name="Trial 1").wait_for()
    visitor.open("/studies/1/trials/2")
    assert "<script>alert('from a traceback')</script>" in page.locator("pre").inner_text()


def test_why_a_strategy_was_chosen_and_what_was_spilled(visitor: Visitor, url: str) -> None:
    import json

    options = [
        {"strategy": "whole", "seconds": 12.0, "device_bytes": 3 * 2**20, "host_bytes": 0, "communicated_bytes": 0,
         "refused": ""},
        {"strategy": "shard", "seconds": 90.0, "device_bytes": 2**20, "host_bytes": 9 * 2**20, "communicated_bytes": 0,
         "refused": ""},
        {"strategy": "pipeline", "seconds": 0, "device_bytes": 0, "host_bytes": 0, "communicated_bytes": 0,
         "refused": "<b>one</b> device is too few"},
    ]  # fmt: skip
    choice = {"strategy": "whole", "because": "it is the fastest that fits", "predicted_seconds": 12.0}
    with open_storage(url) as storage:
        records = StudyRecords(storage, 1)
        plan = {"choice": {**choice, "options": options, "seen": 3}, "stages": [{"device": "cpu:0", "from": "a"}]}
        records.trial(0, plan=json.dumps(plan), spilled_bytes=5 * 2**20)
    page = visitor.open("/studies/1/trials/0")
    chosen = page.locator(".choice")
    chosen.wait_for()
    assert "whole: it is the fastest that fits (predicted 12 s)" in chosen.inner_text()
    rows = [row.split("\t") for row in chosen.locator("tbody tr").all_inner_texts()]
    assert rows == [
        ["whole", "12 s", "3.0 MiB", "0 B", "0 B", ""],
        ["shard", "1 min 30 s", "1.0 MiB", "9.0 MiB", "0 B", ""],
        ["pipeline", "", "", "", "", "<b>one</b> device is too few"],
    ]
    assert chosen.locator("tr.chosen").inner_text().startswith("whole")
    assert "seen" in chosen.inner_text()
    assert "stages" in page.locator("main").inner_text(), "the rest of the plan is shown too"
    assert "spilled at most" in page.locator("main").inner_text()
    timeline = page.evaluate("fetch('/api/studies/1/timeline').then((answer) => answer.json())")
    middle = (timeline["start"] + timeline["end"]) / 2
    with open_storage(url) as storage:
        StudyRecords(storage, 1).spilled(middle, 6 * 2**20, 2**20)
    visitor.open("/studies/1/devices")
    visitor.see_all()
    assert "7.0 MiB" in page.locator(".facts").inner_text()
    page.locator("#spilled-memory .plot svg").first.wait_for()  # it is drawn a moment later
    shown = page.evaluate("document.querySelector('#spilled-memory .plot').data.map((one) => [one.name, one.y.at(-1)])")
    assert shown == [["in host memory", 6], ["on disk", 1]]
    for chart in ("utilisation", "resident-memory", "free-memory"):
        assert page.locator(f"#{chart} .plot svg").count() > 0, chart


def test_parameters_are_copied_as_python_and_json(visitor: Visitor, browser: Any) -> None:
    import ast
    import json

    page = visitor.open("/studies/1/trials/0")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copied = {}
    for kind, read in (("Python", ast.literal_eval), ("JSON", json.loads)):
        page.get_by_role("button", name=f"Copy as {kind}").click()
        page.get_by_text("copied").wait_for()
        copied[kind] = read(page.evaluate("navigator.clipboard.readText()"))
    assert copied["Python"] == copied["JSON"]
    assert set(copied["JSON"]) == {"width", "activation", "lr"}


def test_the_gantt_zooms_and_opens_trials(visitor: Visitor) -> None:
    page = visitor.open("/studies/1/devices")
    canvas = page.locator("canvas.gantt")
    canvas.wait_for()
    visitor.wait("document.querySelector('canvas.gantt').dataset.units > 0")
    visitor.see_all()
    facts = page.locator(".facts").inner_text()
    assert "Devices busy" in facts
    assert "Lower bound" in facts
    whole = page.evaluate("(({start, end}) => end - start)(document.querySelector('canvas.gantt').dataset)")
    page.locator("#gantt").get_by_role("button", name="Zoom in").click()
    visitor.wait(f"(({{start, end}}) => end - start < {whole * 0.6})(document.querySelector('canvas.gantt').dataset)")
    page.locator("#gantt").get_by_role("button", name="Show all").click()
    box = canvas.bounding_box()
    # Somewhere in the first row there is a unit: its tooltip names the trial, and a click opens it.
    for share in range(5, 100, 3):
        page.mouse.move(box["x"] + 80 + (box["width"] - 90) * share / 100, box["y"] + 15)
        if page.locator(".tip").first.is_visible():
            break
    number = re.search(r"trial (\d+)", page.locator(".tip").first.inner_text())
    page.mouse.down()
    page.mouse.up()
    page.get_by_role("heading", name=f"Trial {number[1]}", exact=True).wait_for()


def test_hostile_names_are_shown_inert(visitor: Visitor) -> None:
    page = visitor.open("/")
    page.get_by_role("link", name=HOSTILE).click()
    page.get_by_role("heading", name=HOSTILE).wait_for()
    visitor.see_all()
    page.locator("#leaderboard tbody tr").first.wait_for()
    assert "<i>one</i>" in page.locator("main").inner_text()
    visitor.open("/studies/3/trials/0")
    page.get_by_text("</script><script>alert(4)</script>").wait_for()
    for tag in ("main img", "main b", "main i", "main svg[onload]", "main script"):
        assert page.locator(f"{tag}:not(.meter i)").count() == 0, tag


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1024, "light")])
def test_pages_fit_a_phone_and_a_laptop_in_light_and_dark(
    browser: Any, url: str, tmp_path: Path, width: int, theme: str
) -> None:
    with serving("--storage", url, cwd=tmp_path) as (address, _):
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=theme)
        visitor = Visitor(context.new_page(), address)
        for path in (
            "/",
            "/studies/1",
            "/studies/1/trials/0",
            "/studies/1/devices",
            "/studies/1/compare?trials=0,1",
            "/api",
        ):
            page = visitor.open(path)
            page.locator("main :is(section, table)").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            assert page.evaluate("document.documentElement.dataset.theme") == theme
        page.get_by_role("button", name="Switch between light and dark").click()
        assert page.evaluate("document.documentElement.dataset.theme") != theme
        context.close()
    assert not visitor.troubles


def test_a_report_is_one_file_that_opens_without_a_server(browser: Any, url: str, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert run(["report", "troubled", "--storage", url, "--to", str(target)]) == 0
    assert run(["report", "troubled", "--storage", url, "--to", str(target)]) == 2  # it is there already
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    visitor = Visitor(context.new_page(), f"file://{tmp_path}/")
    page = visitor.open("/report.html")
    page.get_by_role("heading", name="troubled").wait_for()
    visitor.see_all()
    for chart in ("history", "intermediate-values", "slices"):
        visitor.wait(f"document.querySelectorAll('#{chart} .plot svg').length > 0")
    page.get_by_role("button", name="lr", exact=True).click()
    rates = [float(text) for text in _column(page, "lr")]
    assert rates == sorted(rates)
    page.get_by_role("link", name="Devices", exact=True).click()
    visitor.wait("document.querySelector('canvas.gantt')?.dataset.units > 0")
    visitor.open("/report.html#/studies/1/trials/2")
    page.reload()
    assert "<script>alert('from a traceback')</script>" in page.locator("pre").inner_text()
    context.close()
    assert not visitor.troubles


def test_the_api_page_lists_every_operation(visitor: Visitor) -> None:
    page = visitor.open("/api")
    page.get_by_role("heading", name="JSON API").wait_for()
    assert "/api/studies/{study_id}/trials" in page.locator("main").inner_text()


def test_a_running_search_updates_the_page_without_a_reload(browser: Any, tmp_path: Path) -> None:
    with searching(tmp_path, "slow_objective", "--trials", "5"):
        until(lambda: _made(tmp_path))
        with serving("--storage", "sqlite:///live.db", cwd=tmp_path) as (address, _):
            context = browser.new_context(viewport={"width": 1280, "height": 2_400})
            visitor = Visitor(context.new_page(), address)
            page = visitor.open("/studies/1")
            page.evaluate("window.unchanged = true")
            page.locator("#bar .live.on").wait_for()
            for trials in (1, 3, 5):
                visitor.wait(f"document.querySelectorAll('#leaderboard tbody .state.complete').length >= {trials}")
            page.get_by_text("The search has finished.").wait_for()
            visitor.wait("document.querySelector('#history .plot')?.data?.[0].x.length === 5")
            assert "5 of 5" in page.locator(".facts").inner_text()
            assert page.evaluate("window.unchanged")
            context.close()
    assert not visitor.troubles


def test_actions_need_the_token_and_are_obeyed(browser: Any, tmp_path: Path) -> None:
    with searching(tmp_path, "build_slow", "--trials", "2") as search:
        until(lambda: _made(tmp_path))
        with serving("--storage", "sqlite:///live.db", "--allow-actions", cwd=tmp_path) as (address, login):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            page = context.new_page()
            page.on("dialog", lambda dialog: dialog.accept())
            page.goto(f"{address}studies/1")
            page.get_by_role("heading", name="Log in").wait_for()
            page.get_by_label("Token").fill("wrong")
            page.get_by_role("button", name="Log in").click()
            page.get_by_text("this is not the token").wait_for()
            page.goto(login)
            page.get_by_role("heading", name="Studies").wait_for()
            assert "#" not in page.url
            page.goto(f"{address}studies/1/trials/0")
            page.get_by_role("button", name="Stop trial").click()
            page.get_by_text("trial 0 stops after").wait_for()
            page.locator(".head .state.pruned").wait_for()
            page.get_by_role("textbox", name="Note").fill("<b>looked odd</b>")
            page.get_by_role("button", name="Save note").click()
            page.get_by_text("saved").wait_for()
            page.goto(f"{address}studies/1")
            page.get_by_role("button", name="Stop study").click()
            page.get_by_text("The search was stopped before").wait_for()
            context.close()
        assert search.wait() == 130


def test_a_login_leads_to_no_other_site(browser: Any, url: str, tmp_path: Path) -> None:
    """Browsers drop tabs and turn backslashes round: /<tab>/evil.invalid would be another host."""
    with serving("--storage", url, "--allow-actions", cwd=tmp_path) as (address, login):
        for place in ("/%09/evil.invalid", "/%5Cevil.invalid", "//evil.invalid"):
            context = browser.new_context()
            page = context.new_page()
            before, _, token = login.partition("#")
            page.goto(f"{before}?next={place}#{token}")
            page.get_by_role("heading", name="Studies").wait_for()
            assert page.url == address
            context.close()
