"""The application: combines the routes behind the guard, and reports errors as one line of JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp

from hydra_tune.core.errors import StorageError
from hydra_tune.core.version import VERSION
from hydra_tune.dashboard import action_routes, answers, downloads, live, pages, routes
from hydra_tune.dashboard.filters import BadFilter
from hydra_tune.dashboard.live import Closing
from hydra_tune.dashboard.reader import NoSuchStudy, NoSuchTrial, Reader
from hydra_tune.dashboard.security import Guard, Policy
from hydra_tune.storage import open_storage
from hydra_tune.storage.database import masked

DESCRIPTION = """What the dashboard's pages show, for scripts. Numbers that JSON cannot hold come as the words `nan`,
`inf` and `-inf`. Where the dashboard was started with a token, send it as `Authorization: Bearer TOKEN`."""


def make_app(url: str, policy: Policy, reader: Reader | None = None) -> FastAPI:
    """Return the application without the guard; `reader` is one that has begun to read already."""
    reader = reader or Reader(url)
    closing = Closing()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        closing.attach()
        reader.read_ahead()
        yield
        reader.close()
        if app.state.writable is not None:
            app.state.writable.close()

    app = FastAPI(
        title="Hydra Tune", version=VERSION, description=DESCRIPTION, lifespan=lifespan,
        # FastAPI's own documentation pages load scripts from elsewhere; /api is ours.
        docs_url=None, redoc_url=None, openapi_url="/api/openapi.json",
    )  # fmt: skip
    app.state.reader, app.state.policy, app.state.closing = reader, policy, closing
    app.state.writable = open_storage(url) if policy.actions else None
    app.state.server = answers.Server(
        version=VERSION, storage=masked(url), actions=policy.actions, token=policy.token is not None
    )
    for part in (pages, live, downloads, routes, *([action_routes] if policy.actions else [])):
        app.include_router(part.router)
    _explain_errors(app)
    return app


def guarded(app: FastAPI) -> ASGIApp:
    """Return the application behind the guard, as it is served."""
    return Guard(app, app.state.policy)


def _explain_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def bad_request(_: Request, error: RequestValidationError) -> JSONResponse:
        # Without the input, which the answer may be unable to hold: half a character cannot be encoded.
        found = [{name: each[name] for name in ("type", "loc", "msg")} for each in error.errors()]
        return JSONResponse({"detail": found}, 422)

    @app.exception_handler(NoSuchStudy)
    async def no_study(_: Request, error: NoSuchStudy) -> JSONResponse:
        return JSONResponse({"detail": f"there is no study {error.args[0]}"}, 404)

    @app.exception_handler(NoSuchTrial)
    async def no_trial(_: Request, error: NoSuchTrial) -> JSONResponse:
        return JSONResponse({"detail": f"the study has no trial {error.args[0]}"}, 404)

    @app.exception_handler(BadFilter)
    async def bad_filter(_: Request, error: BadFilter) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(StorageError)
    async def no_database(_: Request, error: StorageError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 503)
