"""A report: one HTML file with the dashboard's pages and the data of one study, which opens without a server.

It contains the same modules as the dashboard. Each becomes a data: address in an import map, since a local file cannot
import another; the server's responses are embedded in the file as JSON.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from hydra_tune.dashboard import chart_answers, device_answers, study_answers, trial_answers
from hydra_tune.dashboard.pages import PLOTLY, assets, shell
from hydra_tune.dashboard.reader import Reader, StudyView

MOST_TRIALS = 1_000
DETAILED = 50
"""Number of best trials, and of failed ones, that can be opened in a report; others are only in its table."""
BINS = 240
_IMPORT = re.compile(r"""(from\s+|import\s*\(\s*|import\s+)(["'])(\.[^"']+)\2""")


def write_report(url: str, name: str) -> str:
    """Return the report of the study with this name, as HTML."""
    reader = Reader(url)
    try:
        study_id = reader.study_id(name)
        with reader.study_and_work(study_id) as (view, _):
            return _page(name, {"home": f"/studies/{study_id}", **_answers(reader, view)})
    finally:
        reader.close()


def _answers(reader: Reader, view: StudyView) -> dict[str, Any]:
    """Return the responses that the study's pages need, by path."""
    base = f"/api/studies/{view.columns.study_id}"
    page = trial_answers.trial_page(view, offset=0, limit=MOST_TRIALS, sort=None, down=None, text="")
    found: dict[str, Any] = {
        base: study_answers.study_detail(view),
        f"{base}/trials": page,
        f"{base}/sample": chart_answers.sample(view, 800),
        f"{base}/importances": chart_answers.importances(view),
        f"{base}/failures": chart_answers.failures(view),
        f"{base}/devices": device_answers.devices(view),
    }
    if len(view.metrics) > 1:
        found[f"{base}/pareto"] = chart_answers.pareto(view)
    for objective in range(len(view.metrics)):
        found[f"{base}/history?objective={objective}"] = chart_answers.history(view, objective)
    with reader.connection() as connection:
        found[f"{base}/reports"] = chart_answers.report_curves(connection, view, 40)
        found[f"{base}/timeline?bins={BINS}"] = device_answers.timeline(connection, view, None, None, BINS)
        for number in _worth_opening(view, page.rows):
            detail = trial_answers.trial_detail(connection, view, number, reader.storage.has_hydra_tables)
            found[f"{base}/trials/{number}"] = detail
    return {path: _plain(answer) for path, answer in found.items()}


def _worth_opening(view: StudyView, best_first: Iterable[Any]) -> list[int]:
    failed = [number for failure in chart_answers.failures(view) for number in failure.numbers[:3]]
    best = [row.number for row in best_first]
    return list(dict.fromkeys([*best[:DETAILED], *failed[:DETAILED]]))


def _plain(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_plain(one) for one in answer]
    return answer.model_dump(mode="json")


def _page(name: str, data: dict[str, Any]) -> str:
    files = assets()
    icon = _data_address("image/svg+xml", files["icon.svg"].body)
    html = shell().replace('href="/static/icon.svg"', f'href="{icon}"').replace("<title>", f"<title>{escape(name)} · ")
    scripts = {path: asset.body.decode() for path, asset in files.items() if path.endswith(".js") and path != PLOTLY}
    modules = {path: text for path, text in scripts.items() if path != "theme.js"}
    parts = {
        '<link rel="stylesheet" href="/static/style.css">': f"<style>{files['style.css'].body.decode()}</style>",
        '<script src="/static/theme.js"></script>': f"<script>{_inside(scripts['theme.js'])}</script>",
        '<script type="module" src="/static/app.js"></script>': "\n".join(
            (
                f"<script>{_inside(files[PLOTLY].body.decode())}</script>",
                f'<script type="application/json" id="report-data">{_data_inside(data)}</script>',
                f'<script type="importmap">{json.dumps({"imports": _addresses(modules)})}</script>',
                '<script type="module">import "hydra-tune/app.js";</script>',
            )
        ),
    }
    for there, instead in parts.items():
        assert there in html, there
        html = html.replace(there, instead)
    return html


def _addresses(modules: dict[str, str]) -> dict[str, str]:
    """Return each module under an absolute name, with its imports changed to such names."""
    return {
        f"hydra-tune/{path}": _data_address("text/javascript", _with_names(path, text).encode())
        for path, text in modules.items()
    }


def _with_names(path: str, text: str) -> str:
    folder = path.rpartition("/")[0]

    def named(match: re.Match[str]) -> str:
        target = match[3].removeprefix("./")
        place = folder.rpartition("/")[0] if target.startswith("../") else folder
        target = target.removeprefix("../")
        return f'{match[1]}"hydra-tune/{f"{place}/" if place else ""}{target}"'

    return _IMPORT.sub(named, text)


def _inside(script: str) -> str:
    """Escape text for use within a script element, so that nothing in it ends the element."""
    return script.replace("</", "<\\/").replace("<!--", "<\\!--")


def _data_inside(data: Any) -> str:
    """Return JSON for use within a script element, where no "<" may stand: JSON has no other escape of "<!--"."""
    return json.dumps(data).replace("<", "\\u003c")


def _data_address(media_type: str, body: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(body).decode()}"
