"""A small process that outlives the coordinator briefly and kills processes that workers left behind.

When a coordinator is killed with -9, its workers end, but processes that user code started in them lose their parent
and run on. Each worker leads its own process group, so the coordinator tells the reaper each group when a worker starts
and when it has been collected. When the coordinator ends, for any reason, the reaper kills the remaining groups and
exits. Processes that moved to another session are not found.

The process imports only Python's own modules: it starts in a few milliseconds and stays small.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys

logger = logging.getLogger(__name__)

_CHUNK = 4096


class Reaper:
    """The coordinator's side: a pipe that names process groups, `+` when one starts and `-` when it is gone.

    A full stop ends the reaper.
    """

    def __init__(self) -> None:
        # Isolated and without site-packages for a quick start; in a separate session, which Ctrl-C does not reach.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True,
        )  # fmt: skip

    def watch(self, group: int) -> None:
        """Kill this process group when the coordinator ends."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Do not kill this group any more: it is gone, and its id may be reused."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """End the reaper, which kills the groups that are still registered."""
        assert self._process.stdin is not None
        # An explicit message, because a process forked from this one may keep the pipe open.
        self._say(".\n")
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except (OSError, MemoryError):
            # Most likely the reaper was killed. The search goes on; processes are left behind only if the coordinator
            # is killed with -9 too.
            logger.debug("the reaper was not told", exc_info=True)


def main(coordinator: int) -> None:
    """Read process groups until the coordinator has ended, then kill the remaining ones."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # A service manager that signals all processes means the coordinator, whose end is noticed soon enough.
        signal.signal(number, signal.SIG_IGN)
    for group in _groups_at_the_end_of(coordinator):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _groups_at_the_end_of(coordinator: int) -> set[int]:
    """Return the groups that are registered when the coordinator ends.

    The coordinator has ended when the pipe is closed or the process is gone: a process that it forked may keep the pipe
    open.
    """
    groups: set[int] = set()
    unread = b""
    lines = sys.stdin.fileno()
    try:
        process = os.pidfd_open(coordinator)
    except ProcessLookupError:
        process = -1  # already gone; its messages wait in the pipe
    while True:
        watched = [lines] if process < 0 else [lines, process]
        ready, _, _ = select.select(watched, [], [], 0 if process < 0 else None)
        if lines not in ready:
            return groups
        data = os.read(lines, _CHUNK)
        if not data:
            return groups
        *whole, unread = (unread + data).split(b"\n")
        for line in whole:
            if line == b".":
                return groups
            change = groups.add if line.startswith(b"+") else groups.discard
            change(int(line[1:]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
