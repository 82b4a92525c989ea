"""A search on a real terminal: the cursor is visible again however the search is stopped."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fault.searches import command, wait_for

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
GATED = """
import os, time

def objective(trial):
    open("on", "w")
    while not os.path.exists("go"):
        time.sleep(0.05)
    return trial.suggest_float("x", 0, 1)
"""


class Terminal:
    """A command on a pseudo-terminal, and all that it has printed."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        self.screen, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(
            command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
        )
        os.close(theirs)
        os.set_blocking(self.screen, False)
        self.printed = b""

    def read(self) -> bytes:
        # Linux says EIO instead of an end when nobody holds the other side any more.
        with suppress(BlockingIOError, OSError):
            while data := os.read(self.screen, 65536):
                self.printed += data
        return self.printed

    def wait(self) -> int:
        wait_for(lambda: (self.read(), self.process.poll() is not None)[1], "the end")
        self.read()
        return self.process.returncode


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "gated.py").write_text(GATED)
    terminal = Terminal("search", "gated.py:objective", "--trials", "5", "--devices", "1xcpu", folder=tmp_path)
    try:
        wait_for(lambda: HIDE in terminal.read() and (tmp_path / "on").exists(), "the live display")
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.screen)


def test_one_interrupt_gives_the_terminal_back(search: Terminal, tmp_path: Path) -> None:
    search.process.send_signal(signal.SIGINT)
    wait_for(lambda: b"stopping: " in search.read(), "the first signal")
    (tmp_path / "go").touch()
    assert search.wait() == 130
    assert search.printed.rfind(SHOW) > search.printed.rfind(HIDE)
    assert b"Go on with: " in search.printed


def test_two_interrupts_give_the_terminal_back_too(search: Terminal) -> None:
    search.process.send_signal(signal.SIGINT)
    wait_for(lambda: b"stopping: " in search.read(), "the first signal")
    search.process.send_signal(signal.SIGINT)
    assert search.wait() == -signal.SIGINT
    assert search.printed.rfind(SHOW) > search.printed.rfind(HIDE)
