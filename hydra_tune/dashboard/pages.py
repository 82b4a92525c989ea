"""Pages and their files. All pages share the same HTML; `static/app.js` draws the page of the address."""

from __future__ import annotations

import hashlib
import posixpath
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, Field

from hydra_tune.core.errors import InputError
from hydra_tune.dashboard.routes import StudyId, TrialNumber
from hydra_tune.dashboard.security import Policy

router = APIRouter(include_in_schema=False)

TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
PLOTLY = "plotly.min.js"
IMPORT = re.compile(r'^import [^;]*from "(\.[^"]+)";$', re.MULTILINE)


@dataclass(frozen=True)
class Asset:
    """A file that pages load."""

    body: bytes
    media_type: str
    tag: str


@cache
def assets() -> dict[str, Asset]:
    """Return all files that may be loaded, by path; no other file is ever read from disk."""
    found = {name: _asset(file, name) for name, file in _static_files(files("hydra_tune.dashboard") / "static", "")}
    found[PLOTLY] = _asset(plotly_script(), PLOTLY)
    return found


def plotly_script() -> Traversable:
    """Return the script of the plotly package."""
    try:
        script = files("plotly") / "package_data" / PLOTLY
    except ModuleNotFoundError as error:
        raise InputError("the dashboard needs plotly", "pip install 'hydra-tune[dashboard]'") from error
    return script


def shell() -> str:
    """Return the HTML of every page."""
    return (files("hydra_tune.dashboard") / "static" / "index.html").read_text(encoding="utf-8")


def _static_files(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _static_files(entry, f"{name}/")
        elif name.rpartition(".")[2] in TYPES:
            found.append((name, entry))
    return found


def _asset(file: Traversable, name: str) -> Asset:
    body = file.read_bytes()
    return Asset(body, TYPES[name.rpartition(".")[2]], f'"{hashlib.sha256(body).hexdigest()[:20]}"')


@router.api_route("/static/{name:path}", methods=["GET", "HEAD"])
def static(name: str, request: Request) -> Response:
    """Serve a file that pages load. Browsers revalidate it each time, by its tag."""
    asset = assets().get(name)
    if asset is None:
        raise HTTPException(404, "there is no such file")
    headers = {"etag": asset.tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == asset.tag:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)


@cache
def modules_of(page: str) -> tuple[str, ...]:
    """Return the modules that a page needs, in the order in which they are found."""
    found: list[str] = []
    waiting = ["app.js", f"pages/{page}.js"]
    while waiting:
        module = waiting.pop(0)
        if module not in found:
            found.append(module)
            text = assets()[module].body.decode()
            waiting += [
                posixpath.normpath(posixpath.join(posixpath.dirname(module), other)) for other in IMPORT.findall(text)
            ]
    return tuple(found)


def _page(name: str) -> HTMLResponse:
    # A browser finds an import only after reading the importing module; with this list it requests all at once.
    needed = ", ".join(f"</static/{module}>; rel=modulepreload" for module in modules_of(name))
    return HTMLResponse(shell(), headers={"cache-control": "no-cache", "link": needed})


@router.api_route("/", methods=["GET", "HEAD"])
def studies_page() -> HTMLResponse:
    return _page("studies")


@router.get("/login")
def login_page() -> HTMLResponse:
    return _page("login")


@router.get("/api")
def api_page() -> HTMLResponse:
    return _page("api")


@router.get("/studies/{study_id}")
def study_page(study_id: StudyId) -> HTMLResponse:
    return _page("study")


@router.get("/studies/{study_id}/devices")
def devices_page(study_id: StudyId) -> HTMLResponse:
    return _page("devices")


@router.get("/studies/{study_id}/compare")
def compare_page(study_id: StudyId) -> HTMLResponse:
    return _page("compare")


@router.get("/studies/{study_id}/trials/{number}")
def trial_page(study_id: StudyId, number: TrialNumber) -> HTMLResponse:
    return _page("trial")


class Login(BaseModel):
    """The token, sent once; from then on the browser has a cookie."""

    token: Annotated[str, Field(max_length=1_000)]


@router.post("/api/login", status_code=204)
def login(given: Login, request: Request) -> Response:
    policy: Policy = request.app.state.policy
    if not policy.knows(given.token):
        raise HTTPException(403, "this is not the token")
    answer = Response(status_code=204)
    origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
    secure = request.url.scheme == "https" or policy.behind_tls(origin, host)
    answer.set_cookie(policy.cookie, policy.cookie_value, httponly=True, samesite="strict", secure=secure, path="/")
    return answer
