"""Serves the dashboard; invalid options are reported before anything listens."""

from __future__ import annotations

import socket
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hydra_tune.core.errors import InputError, quoted

if TYPE_CHECKING:
    from hydra_tune.dashboard.security import Policy

MISSING = "pip install 'hydra-tune[dashboard]'"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for serving the dashboard."""

    url: str
    host: str = "127.0.0.1"
    port: int = 8080
    token_file: Path | None = None
    allow_actions: bool = False
    allowed_hosts: tuple[str, ...] = ()
    open_browser: bool = False


def serve(options: Options) -> None:
    """Serve until interrupted. Print the address once it can be opened."""
    with _saying_what_is_missing():
        from hydra_tune.dashboard.reader import Reader

        policy = make_policy(options)
    with _listen(options.host, options.port) as listener, closing(Reader(options.url)) as reader:
        # Reading a large study takes about as long as importing the server's packages: do both at once.
        reader.read_ahead()
        with _saying_what_is_missing():
            import uvicorn

            from hydra_tune.dashboard import app as application
            from hydra_tune.dashboard.pages import assets
            from hydra_tune.dashboard.patience import ImpatientProtocol
        assets()
        app = application.make_app(options.url, policy, reader)

        class Server(uvicorn.Server):
            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                app.state.closing.close()  # open streams would delay the shutdown
                super().handle_exit(sig, frame)

        config = uvicorn.Config(
            application.guarded(app), log_level="warning", access_log=False, server_header=False, lifespan="on",
            proxy_headers=False, timeout_graceful_shutdown=3, http=ImpatientProtocol,
        )  # fmt: skip
        port = listener.getsockname()[1]
        address = f"http://{_shown(options.host)}:{port}/"
        _announce(options, address, policy.token)
        if options.open_browser:
            webbrowser.open(f"{address}login#{policy.token}" if policy.token else address)
        Server(config).run(sockets=[listener])


@contextmanager
def _saying_what_is_missing() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(f"the dashboard needs {error.name}, which is not installed", MISSING) from error


def make_policy(options: Options) -> Policy:
    """Return the policy; raises InputError if it would admit anybody."""
    from hydra_tune.dashboard.security import Policy, hosts_for, is_loopback
    from hydra_tune.dashboard.tokens import token_of

    if not is_loopback(options.host) and options.token_file is None:
        raise InputError(
            f"host {quoted(options.host)} can be reached by others", "give --token-file FILE, or leave --host out"
        )
    token = None
    if options.token_file is not None or options.allow_actions:
        token = token_of(options.token_file or default_token_file(options.url))
    return Policy(
        hosts=hosts_for(options.host, options.allowed_hosts), token=token, actions=options.allow_actions,
        proxied=frozenset(name.lower() for name in options.allowed_hosts),
        cookie=f"hydra_tune_{options.port}",
    )  # fmt: skip


def default_token_file(url: str) -> Path:
    """Return the default token file, beside the database's files."""
    from hydra_tune.coordinator.files import files_directory

    folder = files_directory(url)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "dashboard-token"


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise InputError(f"port cannot be {port}", "give a number below 65536; 0 takes a free one")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(128)  # from now on a visitor waits rather than being refused
        except BaseException:
            listener.close()
            raise
        return listener
    except socket.gaierror as error:
        raise InputError(f"host {quoted(host)} is no address of this machine", "use 127.0.0.1") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot listen on {host}:{port} ({reason.lower()})", "give another --port") from error


def _announce(options: Options, address: str, token: str | None) -> None:
    from hydra_tune.storage.database import masked

    print(f"dashboard of {masked(options.url)}: {address}", file=sys.stderr)
    if token is not None:
        place = options.token_file or default_token_file(options.url)
        # The part after the # is neither sent nor logged; the page reads it there.
        print(f"log in with {address}login#{token} (the token is in {place})", file=sys.stderr)
    print("Ctrl-C ends it", file=sys.stderr, flush=True)


def _shown(host: str) -> str:
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"[{host}]" if ":" in host else host
