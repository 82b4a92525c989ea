"""Requests generated from the published description of the API: none breaks the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.dashboard.conftest import serving

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


def test_no_request_made_from_the_schema_breaks_the_server(url: str, tmp_path: Path) -> None:
    """Schemathesis makes requests from the published description; none gets a 5xx."""
    seen: set[str] = set()
    with serving("--storage", url, "--allow-actions", cwd=tmp_path) as (address, login):
        headers = {"authorization": f"Bearer {login.partition('#')[2]}", "origin": address.rstrip("/")}
        schema = schemathesis.openapi.from_url(f"{address}api/openapi.json", headers=headers)
        # A stream has no end to wait for.
        for operation in schema.exclude(path_regex="/live$").get_all_operations():
            _check(operation.ok(), headers, seen)()
    assert len(seen) > 15


def _check(operation: Any, headers: dict[str, str], seen: set[str]) -> Any:
    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        answer = case.call(headers=headers)
        seen.add(f"{case.method} {case.path}")
        assert answer.status_code < 500, (case.method, case.path, answer.status_code, answer.text[:300])

    return check
