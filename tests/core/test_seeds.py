"""Random streams: a draw from any of the generators is detected."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hydra_tune.core.random_state import RandomState
from hydra_tune.core.seeds import seed_everything

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "numpy": lambda: np.random.rand(),
    "numpy, many": lambda: np.random.rand(5000),
    "random": random.random,
}


@pytest.mark.parametrize("stream", sorted(DRAWS))
def test_a_draw_shows(stream: str) -> None:
    seed_everything(1)
    before = RandomState.capture()
    assert before.same_as(RandomState.capture())
    DRAWS[stream]()
    assert not before.same_as(RandomState.capture())
    before.restore()
    assert before.same_as(RandomState.capture())
