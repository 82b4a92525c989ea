"""A strategy that another package brings by an entry point: searched with, planned, shown and displayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from starlette.testclient import TestClient

from hydra_tune.dashboard.app import make_app
from hydra_tune.dashboard.security import Policy, hosts_for
from hydra_tune.engine.template_client import SHARED

TOY = """
from hydra_tune.core.tables import Table
from hydra_tune.strategies.base import Strategy
from hydra_tune.strategies.estimate import Estimate
from hydra_tune.strategies.whole.strategy import Whole


class Toy(Strategy):
    name = "toy"
    exact = True
    summary = "the plain loop by another name"
    simpler = ()  # it is looked into even where the plain loop would soon be done

    async def train(self, run):
        await Whole().train(run)
        run.planned(self.name, shards=1, plan={"epochs": run.blueprint.epochs})

    @classmethod
    def estimate(cls, look, pool):
        seconds = look.epoch.batches * look.rehearsal.batch_seconds / 5
        return Estimate(strategy=cls.name, seconds=seconds, work=seconds, batch_seconds=seconds / look.epoch.batches)

    @classmethod
    def describe_plan(cls, plan):
        yield "played with"
        yield Table(["toy epochs"], [[str(plan["epochs"])]])
"""
BUILD = """
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht


def build(trial):
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, (rows[:, 0] > 0).long())
    return ht.Candidate(
        model=nn.Linear(4, 2), loss=nn.functional.cross_entropy, train=data, valid=data, batch_size=8, epochs=3,
        optimizer=partial(torch.optim.SGD, lr=trial.suggest_float("lr", 0.01, 0.1)),
    )
"""


def hydra_tune(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder / "packages"), SHARED: ""}
    command = [sys.executable, "-m", "hydra_tune", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_strategy_of_another_package(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    described = packages / "toy-1.0.dist-info"
    described.mkdir(parents=True)
    (packages / "toy.py").write_text(TOY)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[hydra_tune.strategies]\ntoy = toy:Toy\n")
    (tmp_path / "spec.py").write_text(BUILD)
    search = ("search", "spec.py:build", "--trials", "2", "--devices", "1xcpu", "--study")

    found = json.loads(hydra_tune(tmp_path, *search, "alone", "--strategy", "toy", "--json"))
    assert [(trial["state"], trial["strategy"]) for trial in found["trials"]] == [("COMPLETE", "toy")] * 2
    shown = hydra_tune(tmp_path, "show", "alone", "0")
    assert "played with\ntoy epochs\n3" in shown

    either = ("--devices", "1xcpu", "--strategy", "whole,toy")
    planned = hydra_tune(tmp_path, "plan", "spec.py:build", "--trials", "2", *either)
    assert "toy" in planned
    found = json.loads(hydra_tune(tmp_path, *search, "chosen", "--strategy", "whole,toy", "--json"))
    assert [trial["strategy"] for trial in found["trials"]] == ["toy", "toy"]

    with TestClient(make_app(f"sqlite:///{tmp_path}/hydra_tune.db", Policy(hosts=hosts_for("127.0.0.1")))) as client:
        trial = client.get("/api/studies/1/trials/0").json()
        assert (trial["strategy"], trial["plan"]) == ("toy", {"epochs": 3})
        assert client.get("/api/studies/1/devices").status_code == 200
