"""Decides which requests are answered, and adds the headers of every response.

A loopback address alone does not make a dashboard private: any page in the user's browser may send it requests, and by
DNS rebinding may read the responses. So every request is judged before any route sees it (`judge`, pure), and
everything not public needs the token if one is set.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

METHODS = ("GET", "HEAD", "POST", "PUT")
READS = {"allow": "GET, HEAD"}
LARGEST_BODY = 64 * 1024
PUBLIC = frozenset({"/login", "/api/login"})
"""Paths that need no token; neither do static files, which hold no data of studies."""
STATIC = "/static/"

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "connect-src 'self'", "img-src 'self' data: blob:",
        # Plotly positions its labels with style attributes; at worst a style looks wrong.
        "style-src 'self' 'unsafe-inline'", "base-uri 'none'", "form-action 'self'", "frame-ancestors 'none'",
    )
)  # fmt: skip
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The hosts, token and actions that requests are checked against."""

    hosts: frozenset[str]
    """Allowed names and addresses in the Host header, in lower case."""
    token: str | None = None
    actions: bool = False
    cookie: str = "hydra_tune"
    proxied: frozenset[str] = frozenset()
    """Those of the hosts that a proxy with TLS may answer for: their pages are https, the request here is not."""

    def __post_init__(self) -> None:
        if self.actions and not self.token:
            raise ValueError("actions need a token")

    @property
    def cookie_value(self) -> str:
        """Value of the browser's cookie: proves knowledge of the token without containing it."""
        return hmac.new((self.token or "").encode(), b"hydra-tune dashboard cookie", hashlib.sha256).hexdigest()

    def own_origin(self, origin: str, scheme: str, host: str) -> bool:
        """True if a page with this Origin is one of ours."""
        return origin.lower() == f"{scheme}://{host.lower()}" or self.behind_tls(origin, host)

    def behind_tls(self, origin: str, host: str) -> bool:
        """True if the visitor's page came by https from a proxy in front."""
        return host_name(host) in self.proxied and origin.lower() == f"https://{host.lower()}"

    def admits(self, headers: Mapping[str, str]) -> bool:
        """True if the request carries the token, in its cookie or as `Authorization: Bearer`."""
        if self.token is None:
            return True
        return self.bearer(headers) or self._same(self._cookie(headers), self.cookie_value)

    def bearer(self, headers: Mapping[str, str]) -> bool:
        """True if the request has the token itself, which no page of another site can make a browser send."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return self.token is not None and scheme.lower() == "bearer" and self.knows(given.strip())

    def knows(self, given: str) -> bool:
        """True if `given` is the token."""
        return self.token is not None and self._same(given, self.token)

    def _cookie(self, headers: Mapping[str, str]) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value

    @staticmethod
    def _same(given: str, expected: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


@dataclass(frozen=True)
class Refusal:
    """The reason why a request is not answered."""

    status: HTTPStatus
    detail: str
    headers: dict[str, str] = field(default_factory=dict)


def judge(policy: Policy, method: str, path: str, scheme: str, headers: Mapping[str, str]) -> Refusal | None:
    """Return None if the request is allowed, otherwise the refusal; checks that reveal least come first."""
    host = headers.get("host", "")
    if host_name(host) not in policy.hosts:
        return Refusal(HTTPStatus.FORBIDDEN, "this Host is not served here; use the address that the server printed")
    if method not in METHODS:
        return Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "this method is not known here", READS)
    origin = headers.get("origin")
    foreign = origin is not None and not policy.own_origin(origin, scheme, host)
    if foreign or _is_from_elsewhere(method, path, headers):
        return Refusal(HTTPStatus.FORBIDDEN, "requests from pages of other sites are refused")
    if _body_size(headers) > LARGEST_BODY:
        return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have {LARGEST_BODY} bytes")
    public = path in PUBLIC or path.startswith(STATIC)
    if not public and not policy.admits(headers):
        if method == "GET" and "text/html" in headers.get("accept", "") and not path.startswith("/api/"):
            return Refusal(HTTPStatus.SEE_OTHER, "log in first", {"location": f"/login?next={quote(path)}"})
        return Refusal(HTTPStatus.UNAUTHORIZED, "the token is needed", {"www-authenticate": "Bearer"})
    if method in ("GET", "HEAD"):
        return None
    if not public and not policy.actions:
        return Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "actions need `hydra-tune dashboard --allow-actions`", READS)
    # Browsers send an origin with every such request; clients without one must send the token itself.
    if origin is None and not policy.bearer(headers):
        return Refusal(HTTPStatus.FORBIDDEN, "a request that changes something needs an Origin or the token")
    return None


def _is_from_elsewhere(method: str, path: str, headers: Mapping[str, str]) -> bool:
    """True if the browser says that a page of another site sends this, except for a link to one of our pages.

    Such a page may send GET requests without an Origin. It cannot read the responses, but they cost time and memory.
    """
    if headers.get("sec-fetch-site", "none").lower() in ("none", "same-origin"):
        return False
    followed = headers.get("sec-fetch-mode", "").lower() == "navigate" and method in ("GET", "HEAD")
    return not followed or path.startswith("/api/")


def host_name(host: str) -> str:
    """Return the name in a Host header, without its port, which does not matter for rebinding."""
    text = host.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def is_loopback(host: str) -> bool:
    """True if a server on this address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hosts_for(host: str, also: tuple[str, ...] = ()) -> frozenset[str]:
    """Return the names by which a server on `host` may be called."""
    names = {"localhost", "127.0.0.1", "::1", host.lower(), *(name.lower() for name in also)}
    if host in ("0.0.0.0", "::", ""):
        names.discard(host)
        names |= {socket.gethostname().lower(), socket.getfqdn().lower(), *_own_addresses()}
    return frozenset(names)


def _own_addresses() -> set[str]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = (address for addresses in psutil.net_if_addrs().values() for address in addresses)
    return {address.address.partition("%")[0].lower() for address in found if address.family in families}


def _body_size(headers: Mapping[str, str]) -> int:
    length = headers.get("content-length", "0")
    return int(length) if length.isascii() and length.isdigit() else 0


class _TooLarge(Exception):
    """A body without a declared length exceeded the limit."""


class Guard:
    """The policy around an application: requests refused by `judge` reach no route."""

    def __init__(self, app: ASGIApp, policy: Policy) -> None:
        self.app = app
        self.policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # websockets are not supported
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

        too_large = False
        received = 0

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        async def unless_too_large(message: Message) -> None:
            if not too_large:  # otherwise the application's response to the broken body is dropped
                await with_headers(message)

        async def counted() -> Message:
            nonlocal received, too_large
            message = await receive()
            received += len(message.get("body", b""))
            if received > LARGEST_BODY:
                too_large = True
                raise _TooLarge
            return message

        refusal = judge(self.policy, scope["method"], scope["path"], scope["scheme"], headers)
        if refusal is None:
            try:
                await self.app(scope, counted, unless_too_large)
            except _TooLarge:
                logger.debug("a request body without a declared length exceeds the limit")
            if not too_large:
                return
            refusal = Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have {LARGEST_BODY} bytes")
        answer = JSONResponse({"detail": refusal.detail}, refusal.status, refusal.headers)
        await answer(scope, receive, with_headers)
