"""A small process that outlives the coordinator by a moment, and ends what the workers left behind.

The kernel kills the workers of a coordinator that was killed with -9, but not the processes that user code had started
in them: those lose their parent and run on. Each worker leads a process group of its own, so the coordinator names each
group to the reaper when a worker starts and when it has been collected. When the coordinator ends, by whatever means,
the reaper kills the groups that are still named, and ends too. What moved to a session of its own is not found.

The process imports nothing but Python's own modules: it starts in a few milliseconds and stays small.
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
    """The coordinator's end: a pipe on which groups are named, `+` when one starts and `-` when it is gone.

    A full stop ends the reaper.
    """

    def __init__(self) -> None:
        # Isolated and without site-packages, for a quick start; in a session of its own, where Ctrl-C is not heard.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True,
        )  # fmt: skip

    def watch(self, group: int) -> None:
        """Kill this process group when the coordinator ends."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """This group is gone; its number may soon be another's."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """End the reaper, and with it the groups that are still named."""
        assert self._process.stdin is not None
        # In words: a process that was forked from this one may hold the pipe open.
        self._say(".\n")
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            # Somebody killed it: a search goes on without, and only a kill -9 on top of that would leave processes.
            logger.debug("the reaper is gone")


def main(coordinator: int) -> None:
    """Read the names of groups until the coordinator is gone, then kill those that are left."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Whoever stops all processes of a service together means the coordinator, whose end is heard soon enough.
        signal.signal(number, signal.SIG_IGN)
    for group in _groups_at_the_end_of(coordinator):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _groups_at_the_end_of(coordinator: int) -> set[int]:
    """The groups that were named and not taken back when the coordinator ended.

    Its end is the end of the pipe, or of the process itself: something that the coordinator forked may hold the pipe
    open after it.
    """
    groups: set[int] = set()
    unread = b""
    lines = sys.stdin.fileno()
    try:
        process = os.pidfd_open(coordinator)
    except ProcessLookupError:
        process = -1  # gone already, and what it said waits in the pipe
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
