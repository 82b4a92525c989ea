"""Which requests are refused, and every route without its token."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hydra_tune.cli.app import run
from hydra_tune.core.errors import InputError
from hydra_tune.dashboard.app import guarded, make_app
from hydra_tune.dashboard.reader import LOCKS, MOST_KEPT
from hydra_tune.dashboard.security import HEADERS, LARGEST_BODY, PUBLIC, Policy, hosts_for, judge
from hydra_tune.dashboard.server import Options, make_policy
from hydra_tune.dashboard.tokens import token_of
from tests.dashboard.conftest import TOKEN, Client

ORIGIN = {"origin": "http://localhost:8080"}
PATHS = ("/", "/studies/1", "/api", "/api/studies", "/static/app.js", "/login", "/nothing")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "host", ["evil.com", "127.0.0.1.evil.com", "localhost.evil.com:8080", "", "[::2]", "evil.com#localhost"]
)
def test_another_host_is_refused(client: Client, host: str) -> None:
    for path in PATHS:
        assert client().get(path, headers={"host": host}).status_code == 403, path


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8080", "LOCALHOST:80", "localhost."])
def test_the_own_names_are_served_on_any_port(client: Client, host: str) -> None:
    assert client().get("/api/studies", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.com", "null", "https://localhost:8080", "http://localhost:9999", "http://localhost"]
)
def test_a_foreign_origin_is_refused_whatever_the_method(client: Client, origin: str) -> None:
    app = client(token=TOKEN, actions=True)
    headers = {"origin": origin, "authorization": f"Bearer {TOKEN}"}
    assert app.get("/api/studies", headers=headers).status_code == 403
    asked = app.post("/api/studies/1/actions", json={"kind": "stop-study"}, headers=headers)
    assert asked.status_code == 403


def test_the_own_origin_is_served(client: Client) -> None:
    assert client().get("/api/studies", headers=ORIGIN).status_code == 200


@pytest.mark.parametrize("method", ["BREW", "TRACE", "CONNECT", "OPTIONS", "PATCH", "DELETE", "POST", "PUT"])
def test_methods_that_no_route_has_are_refused(client: Client, method: str) -> None:
    for path in PATHS[:5]:
        answer = client().request(method, path, headers=ORIGIN)
        assert answer.status_code == 405, path
        assert "GET" in answer.headers["allow"]


@pytest.mark.parametrize(
    "path",
    [
        "/%2e%2e%2f%2e%2e%2fetc/passwd", "/static/%2e%2e%2fapp.py", "/static/..%2f..%2fapp.py", "/static/%2e%2e/app.py",
        "/static//etc/passwd", "/static/%00", "/static/", "/static/pages", "/studies/%2e%2e%2f1", "/docs", "/redoc",
        "/openapi.json",
    ],
)  # fmt: skip
def test_paths_that_lead_elsewhere_are_not_found(client: Client, path: str) -> None:
    assert client().get(path).status_code in (404, 422), path
    if path.startswith("/static"):
        assert client().get(path).status_code == 404


def test_a_huge_body_is_refused(client: Client) -> None:
    app = client(token=TOKEN, actions=True)
    headers = {**ORIGIN, "authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    declared = app.put("/api/studies/1/trials/0/note", content=b"x" * (LARGEST_BODY + 1), headers=headers)
    streamed = app.put("/api/studies/1/trials/0/note", content=iter([b"x" * 40_000] * 3), headers=headers)
    unread = app.get("/api/studies", headers={"content-length": str(10**9)})
    assert [declared.status_code, streamed.status_code, unread.status_code] == [413, 413, 413]


def test_every_answer_carries_the_headers(client: Client) -> None:
    app = client(token=TOKEN)
    for path in PATHS:
        for headers in ({}, {"host": "evil.com"}, {"authorization": f"Bearer {TOKEN}"}):
            answer = app.get(path, headers=headers)
            for name, value in HEADERS.items():
                assert answer.headers[name] == value, (path, headers, name)
    policy = HEADERS["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.partition("style-src")[0]


def _addresses(url: str, actions: bool) -> list[tuple[str, str]]:
    """Method and address of every route, its parameters filled in."""
    app = make_app(url, Policy(hosts=hosts_for("127.0.0.1"), token=TOKEN, actions=actions))
    app.state.reader.close()
    if app.state.writable:
        app.state.writable.close()
    found = []
    for route in _routes(app):
        path = route.path.replace("{name:path}", "app.js")
        found += [(method, re.sub(r"\{\w+\}", "1", path)) for method in route.methods]
    assert len(found) > 25
    # The same as the description that is published, and the pages besides: none was overlooked here.
    described = {(m.upper(), re.sub(r"\{\w+\}", "1", p)) for p, ms in app.openapi()["paths"].items() for m in ms}
    assert len(described) > 15
    assert described <= set(found)
    return found


def _routes(within: Any) -> Iterator[Any]:
    """All routes, those of included routers too, however FastAPI keeps them."""
    for route in within.routes:
        if hasattr(route, "original_router"):
            yield from _routes(route.original_router)
        else:
            assert route.path, route
            yield route


def test_every_route_needs_the_token_unless_it_is_public(client: Client, url: str) -> None:
    app = client(token=TOKEN, actions=True)
    for method, path in _addresses(url, actions=True):
        status = app.request(method, path, headers=ORIGIN).status_code
        if path in PUBLIC or path.startswith("/static/"):
            assert status not in (401, 403), path
        else:
            assert status == 401, (method, path)


def test_every_route_that_changes_something_needs_actions_and_an_origin(client: Client, url: str) -> None:
    changing = [(m, p) for m, p in _addresses(url, actions=True) if m not in ("GET", "HEAD") and p not in PUBLIC]
    assert {path for _, path in changing} == {"/api/studies/1/actions", "/api/studies/1/trials/1/note"}
    looking, doing = client(token=TOKEN), client(token=TOKEN, actions=True)
    login = doing.post("/api/login", json={"token": TOKEN}, headers=ORIGIN)
    assert login.status_code == 204
    for method, path in changing:
        bearer = {"authorization": f"Bearer {TOKEN}"}
        assert looking.request(method, path, headers={**ORIGIN, **bearer}).status_code == 405
        # With the cookie alone and no origin: what an old browser would send for a page of another site.
        assert doing.request(method, path, json={}).status_code == 403
        assert doing.request(method, path, json={}, headers={"origin": "http://evil.com"}).status_code == 403
        assert doing.request(method, path, json={}, headers=ORIGIN).status_code == 422


def test_the_token_opens_by_cookie_or_header_and_nothing_else_does(client: Client) -> None:
    app = client(token=TOKEN)
    for wrong in ("", TOKEN[:-1], TOKEN + "x", "ä"):
        assert app.post("/api/login", json={"token": wrong}, headers=ORIGIN).status_code == 403
        assert app.get("/api/studies", headers={"authorization": f"Bearer {wrong}".encode()}).status_code == 401
    assert app.get("/api/studies", params={"token": TOKEN}).status_code == 401
    answer = app.post("/api/login", json={"token": TOKEN}, headers=ORIGIN)
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    assert app.get("/api/studies").status_code == 200
    app.cookies.clear()
    assert app.get("/api/studies").status_code == 401
    assert app.get("/api/studies", headers={"cookie": 'hydra_tune="; =broken'}).status_code == 401


def test_a_browser_without_the_token_is_led_to_the_login(client: Client) -> None:
    app = client(token=TOKEN)
    browser = {"accept": "text/html,*/*"}
    answer = app.get("/studies/1", headers=browser, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/studies/1")
    assert app.get("/api/studies", headers=browser).status_code == 401


def test_a_login_from_another_site_is_refused(client: Client) -> None:
    app = client(token=TOKEN)
    assert app.post("/api/login", json={"token": TOKEN}, headers={"origin": "http://evil.com"}).status_code == 403
    assert app.post("/api/login", json={"token": TOKEN}).status_code == 403


@pytest.mark.smoke
def test_actions_never_come_without_a_token() -> None:
    with pytest.raises(ValueError, match="token"):
        Policy(hosts=frozenset({"localhost"}), actions=True)
    assert judge(Policy(hosts=hosts_for("127.0.0.1")), "GET", "/", "http", {"host": "localhost"}) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_a_host_that_others_can_reach_needs_a_token_file(
    url: str, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dashboard", "--storage", url, "--host", host]) == 2
    assert "--token-file" in capsys.readouterr().err


def test_a_wildcard_host_is_served_by_the_machines_own_names_only(tmp_path: Path) -> None:
    policy = make_policy(Options(url="sqlite:///x.db", host="0.0.0.0", token_file=tmp_path / "token"))
    assert "0.0.0.0" not in policy.hosts
    assert "127.0.0.1" in policy.hosts
    assert judge(policy, "GET", "/login", "http", {"host": "evil.com"}) is not None


def test_a_token_file_is_made_for_its_owner_only_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = token_of(path)
    assert len(token) >= 40
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert token_of(path) == token
    path.chmod(0o644)
    with pytest.raises(InputError, match=r"can be read by others.*chmod 600"):
        token_of(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(InputError, match="at least 16"):
        token_of(path)
    with pytest.raises(InputError, match="cannot be made"):
        token_of(tmp_path / "no" / "such" / "folder")


def test_the_database_is_opened_to_read_unless_actions_are_allowed(url: str) -> None:
    looking = make_app(url, Policy(hosts=frozenset()))
    assert looking.state.writable is None
    assert looking.state.reader.storage.read_only
    looking.state.reader.close()


def test_a_password_in_the_url_is_masked() -> None:
    from hydra_tune.storage.database import masked

    assert "secret" not in masked("postgresql://me:secret@host/name")


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--port", "70000"], "port cannot be 70000"),
     (["--host", "256.1.1.1", "--token-file", "t"], "no address of this machine")],
)  # fmt: skip
def test_bad_options_get_one_line(url: str, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dashboard", "--storage", url, *flags]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_missing_database_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dashboard", "--storage", "sqlite:///missing.db", "--port", "0"]) == 2
    assert "does not exist" in capsys.readouterr().err


CROSS = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", ["/api/studies/1/sample?limit=11", "/api/studies", "/", "/static/app.js"])
def test_a_page_of_another_site_gets_nothing_computed(client: Client, site: str, path: str) -> None:
    """Such a page may send reads without an Origin; it could not see the answers, but fill memory with them."""
    assert client().get(path, headers={**CROSS, "sec-fetch-site": site}).status_code == 403


def test_a_link_from_another_site_may_be_followed(client: Client) -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client().get("/studies/1", headers=followed).status_code == 200
    assert client().get("/api/studies", headers=followed).status_code == 403
    for site in ("same-origin", "none"):
        assert client().get("/api/studies", headers={"sec-fetch-site": site}).status_code == 200


def test_what_is_kept_of_a_study_is_bounded(client: Client) -> None:
    app = client()
    for limit in range(10, 110):
        assert app.get(f"/api/studies/1/sample?limit={limit}").status_code == 200
        assert app.get(f"/api/studies/1/timeline?bins={limit}").status_code == 200
        assert app.get(f"/api/studies/{limit + 1000}").status_code == 404
    reader = app.app.app.state.reader
    assert all(len(view._kept) <= MOST_KEPT for view in reader._views.values())
    assert len(reader._locks) == LOCKS


BEHIND_TLS = {"host": "dash.example.org", "origin": "https://dash.example.org"}


def test_behind_a_proxy_with_tls_one_can_log_in(url: str) -> None:
    policy = make_policy(Options(url=url, allowed_hosts=("Dash.Example.org",), allow_actions=True))
    with TestClient(guarded(make_app(url, policy)), base_url="http://dash.example.org") as app:
        answer = app.post("/api/login", json={"token": policy.token}, headers=BEHIND_TLS)
        assert answer.status_code == 204
        assert "; Secure" in answer.headers["set-cookie"]
        cookie = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
        assert app.get("/api/studies", headers={**BEHIND_TLS, **cookie}).status_code == 200
        for other in ("https://evil.example.org", "https://dash.example.org:444"):
            assert app.get("/api/studies", headers={**BEHIND_TLS, **cookie, "origin": other}).status_code == 403
        plain = app.post("/api/login", json={"token": policy.token}, headers={"origin": "http://dash.example.org"})
        assert "Secure" not in plain.headers["set-cookie"]


def test_odd_characters_get_an_answer(client: Client) -> None:
    app = client(token=TOKEN, actions=True)
    headers = {**ORIGIN, "authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    assert app.get("/api/studies/1/trials?filter=\u00b2", headers=headers).status_code == 200
    note = app.put("/api/studies/1/trials/0/note", content=b'{"text": "\\ud800"}', headers=headers)
    assert (note.status_code, "unicode" in note.text) == (422, True)


def test_requests_sent_by_halves_do_not_keep_visitors_out(filled: Path) -> None:
    """More half-sent requests than a process may have files, from a host that never goes on."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80)); "
    patience = "import hydra_tune.dashboard.patience as p; p.ARRIVAL_SECONDS = 1.0; "
    main = "from hydra_tune.cli.app import run; run(['dashboard', '--port', '0', '--storage', 'sqlite:///seen.db'])"
    command = [sys.executable, "-c", limit + patience + main]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=filled)
    halves = []
    try:
        assert server.stderr is not None
        printed = next(line for line in server.stderr if line.startswith("dashboard of"))
        port = int(printed.rpartition(":")[2].strip().strip("/"))
        drain = threading.Thread(target=server.stderr.read, daemon=True)
        drain.start()
        for number in range(100):
            half = socket.create_connection(("127.0.0.1", port))
            half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" if number % 2 else b"")
            halves.append(half)
        with socket.create_connection(("127.0.0.1", port)) as visitor:
            visitor.sendall(b"GET /api/server HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert visitor.recv(15) == b"HTTP/1.1 200 OK"
        # A connection that was answered must send its next request in time, too.
        with socket.create_connection(("127.0.0.1", port)) as visitor:
            visitor.sendall(b"GET /api/server HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert visitor.recv(15) == b"HTTP/1.1 200 OK"
            visitor.sendall(b"POST /api/login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nx")
            while visitor.recv(1 << 16):
                pass
    finally:
        for half in halves:
            half.close()
        server.terminate()
        server.wait()
        drain.join()
        server.stderr.close()
