"""Tensors passed from worker to worker arrive unchanged, and their files are removed with the trial."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hydra_tune.spill.places import remove_directory
from hydra_tune.strategies.pipeline.handover import Handover
from tests.strategies.shard.models import CPU


def test_what_is_received_is_what_was_sent(tmp_path: Path) -> None:
    sender, receiver = Handover(tmp_path, CPU), Handover(tmp_path, CPU)
    value = {"a": torch.randn(3, 4).t().requires_grad_(), "b": (torch.arange(5), "text"), "c": torch.empty(0, 2)}
    for _ in range(2):
        got = receiver.receive(sender.send("x", value))
        torch.testing.assert_close(got["a"], value["a"].detach(), rtol=0, atol=0)
        assert got["a"].requires_grad
        assert got["a"].stride() == value["a"].stride()
        assert got["b"][0].tolist() == [0, 1, 2, 3, 4]
        assert got["b"][1] == "text"
        assert got["c"].shape == (0, 2)
        value["a"] = torch.randn(3, 4).t().requires_grad_()  # the same place is used again


def test_a_worker_that_sends_after_the_end_leaves_nothing_behind(tmp_path: Path) -> None:
    place = tmp_path / "passing"
    place.mkdir()
    sender = Handover(place, CPU)
    sender.send("x", torch.ones(10))
    remove_directory(place)
    with pytest.raises(FileNotFoundError):
        sender.send("y", torch.ones(10))
    assert list(tmp_path.iterdir()) == []
    remove_directory(place)
