"""Blocks that have left the device and are still on their way to their files.

All methods are called with the lock of `news` held.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

from hydra_tune.spill.store import SpillFiles

logger = logging.getLogger(__name__)


class Leaving:
    """Counts the writes that have begun and not ended, and keeps the first failure of each trial's files."""

    def __init__(self, news: threading.Condition) -> None:
        self._news = news
        self._writes: Counter[tuple[int, str]] = Counter()
        self._failed: dict[int, BaseException] = {}

    def begin(self, files: SpillFiles, key: str) -> None:
        """Note that a write of a block begins."""
        self._writes[id(files), key] += 1

    def end(self, files: SpillFiles, key: str) -> None:
        """Note that a write of a block is over."""
        self._writes[id(files), key] -= 1
        if not self._writes[id(files), key]:
            del self._writes[id(files), key]
        self._news.notify_all()

    def fail(self, files: SpillFiles, failure: BaseException) -> None:
        """Keep a failed write for whoever uses the files next."""
        self._failed.setdefault(id(files), failure)

    def has(self, files: SpillFiles, key: str) -> bool:
        """True if a block's newest content is not yet in its file."""
        return (id(files), key) in self._writes

    def wait_for(self, files: SpillFiles, key: str) -> None:
        """Wait until a block is in its file."""
        while self.has(files, key):
            self._news.wait()

    def wait_for_all(self, files: SpillFiles) -> None:
        """Wait until all blocks of a trial are in their files."""
        while any(owner == id(files) for owner, _ in self._writes):
            self._news.wait()

    def raise_failure(self, files: SpillFiles) -> None:
        """Raise the failure of an earlier write, if there was one."""
        if (failure := self._failed.pop(id(files), None)) is not None:
            raise failure

    def forget_failure(self, files: SpillFiles) -> None:
        """Forget the failure of a trial that has ended."""
        self._failed.pop(id(files), None)
