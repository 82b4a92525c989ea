"""A candidate that is sent to a worker: a copy works there as the original does, or it is built again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hydra_tune as ht
from hydra_tune.core.errors import CandidateError
from hydra_tune.training import prepared as prepared_module
from hydra_tune.training.prepared import Origin, Prepared, fingerprint, packed_candidate, prepare, receive
from hydra_tune.training.remote_trial import TrialInfo
from hydra_tune.training.sent import packed_for_workers, shapes_of_parameters, unpacked_in_worker

NOTED: set[str] = set()
"""What a library knows of its classes: noted when an object of one is made, looked up in its forward."""
ORIGIN = Origin("", TrialInfo(0, 3, "a"))


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        NOTED.add("Noting")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert "Noting" in NOTED, "the library does not know the class"
        return self.layer(x)  # type: ignore[no-any-return]


def made() -> ht.Candidate:
    data = TensorDataset(torch.zeros(4, 4), torch.zeros(4).long())
    return ht.Candidate(
        model=Noting(), loss=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1), train=data, batch_size=2,
        epochs=1,
    )  # fmt: skip


def worker(folder: Path, builds: list[str], make: Any = made) -> Any:
    def build(_trial: Any) -> ht.Candidate:
        builds.append("built")
        found: ht.Candidate = make()
        return found

    setup = SimpleNamespace(directory=str(folder), worker=0, torch_devices=("cpu",))
    return SimpleNamespace(setup=setup, cache={"build": build}, unit="")


def test_a_worker_that_has_only_copies_builds_once_for_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The module of this file stands for an installed package.
    monkeypatch.setattr(prepared_module, "_is_of_library", lambda name: name == __name__)
    builder = worker(tmp_path, [])
    prepared = prepare(builder, made(), ORIGIN)
    parcel = packed_candidate(builder, prepared)
    NOTED.clear()  # as it is in another process
    builds: list[str] = []
    other = worker(tmp_path, builds)
    for _ in range(2):
        received = receive(other, parcel)
        received.candidate.model(torch.zeros(1, 4))
        assert fingerprint(received.candidate.model) == fingerprint(prepared.candidate.model)
    assert len(builds) == 1


def hooked(prepared: Prepared) -> Prepared:
    prepared.candidate.model.layer.weight.register_hook(lambda gradient: gradient * 2)
    return prepared


def sent(folder: Path, make: Any) -> Prepared:
    """Send a candidate of which no copy can be made, to a worker that builds it by `make`."""
    builder = worker(folder, [])
    torch.manual_seed(3)
    prepared = hooked(prepare(builder, made(), ORIGIN))
    model = prepared.candidate.model
    data = packed_for_workers(builder, prepared, fingerprint(model), shapes_of_parameters(model), "rest")
    received, rest = unpacked_in_worker(worker(folder, [], make), data)
    assert rest == "rest"
    return received


def test_what_a_copy_would_lack_is_built_again(tmp_path: Path) -> None:
    # The worker seeds its generators as the builder did.
    assert sent(tmp_path, lambda: (torch.manual_seed(3), made())[1]).candidate.model.layer.weight.shape == (2, 4)


def test_a_build_that_makes_other_weights_is_refused(tmp_path: Path) -> None:
    def other() -> ht.Candidate:
        torch.manual_seed(4)
        return made()

    with pytest.raises(CandidateError, match="build makes other weights when it is called again with the same seed"):
        sent(tmp_path, other)
