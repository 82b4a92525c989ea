"""The part that runs inside Ray, on each node: starts the agent as a process, and waits for its end.

The agent is no part of the Ray worker's process: Ray's threads and signal handlers do not reach it, and when Ray ends
the worker, the agent notices by its input and ends its own workers and directories in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading

from hydra_tune.cluster.agent import ENDED, REFUSED, UNREACHABLE

LAST_WORDS = 2000
"""Bytes of the agent's output that are passed on."""
LINGER_SECONDS = 15.0
"""Seconds after which the actor ends by itself if the bridge does not end it: the bridge may be gone."""
FINISHED, OF_NO_USE, DIED = "finished", "of no use", "died"


class RayAgent:
    """An actor that holds all of a node's devices while the agent runs; it becomes an actor in the bridge."""

    def run(self, order: str) -> tuple[str, str]:
        """Run the agent to its end; return how it ended, and what it said last."""
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "hydra_tune.cluster.agent"], stdin=subprocess.PIPE, stdout=said, stderr=said,
                env={**os.environ, "PYTHONSAFEPATH": "1"}, start_new_session=True,
            )  # fmt: skip
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its exit code says more
                process.stdin.write(order.encode())
                process.stdin.flush()
            code = process.wait()
            threading.Timer(LINGER_SECONDS, os._exit, [0]).start()
            process.stdin.close()
            said.seek(max(0, said.tell() - LAST_WORDS))
            text = said.read().decode(errors="replace").strip()
        if code != ENDED:
            _remove_directories()
        if code in (UNREACHABLE, REFUSED):
            return OF_NO_USE, text.splitlines()[-1] if text else f"exit code {code}"
        if code < 0:
            return DIED, f"its agent was killed (signal {-code}, {signal.Signals(-code).name})"
        return (FINISHED, "") if code == ENDED else (DIED, text.splitlines()[-1] if text else f"exit code {code}")


def _remove_directories() -> None:
    """Remove the directories of the killed agent, which nobody else would before the next search here."""
    from hydra_tune.coordinator.run_directories import remove_abandoned

    remove_abandoned()
