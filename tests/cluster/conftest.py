"""Searches on nodes that are processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.cluster.machines import Machines

Started = Callable[[Sequence[int]], Machines]


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Makes the next search with `cluster="auto"` run on nodes with these numbers of CPUs."""

    def start(cpus: Sequence[int]) -> Machines:
        made = Machines(cpus)
        monkeypatch.setattr("hydra_tune.cluster.search._ray", lambda settings: made)
        return made

    return start
