"""Optuna's callbacks for other libraries: they report, prune and end a trial as in `study.optimize`."""

from __future__ import annotations

import pytest
from optuna.trial import TrialState

import hydra_tune as ht
from tests.optuna.integrations import KINDS, ROUNDS, Later, objective

pytest.importorskip("optuna_integration")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ht.SearchResult:
    """One search, whose trials train with one library after the other: to the end, pruned, and on two processes."""
    found = ht.search(
        objective, trials=2 * len(KINDS) + 1, direction="maximize", pruner=Later(), devices="1xcpu", sampler="random",
        seed=1, progress=False, storage=f"sqlite:///{tmp_path_factory.mktemp('integrations')}/x.db",
    )  # fmt: skip
    found.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_reports_and_prunes(result: ht.SearchResult, kind: str) -> None:
    whole, pruned = (result.study.trials[KINDS.index(kind) + shift] for shift in (0, len(KINDS)))
    assert (whole.state, pruned.state) == (TrialState.COMPLETE, TrialState.PRUNED), result.trials[whole.number].error
    assert len(whole.intermediate_values) == (3 if kind == "sklearn" else ROUNDS)
    assert len(pruned.intermediate_values) == 2
    assert 0.2 < whole.value <= 1.0
    result.close()


def test_lightning_on_two_processes(result: ht.SearchResult) -> None:
    """The trial is used in processes that `ddp_spawn` starts; what rank 0 said there is in the database."""
    pruned = result.study.trials[-1]
    assert pruned.state is TrialState.PRUNED, result.trials[-1].error
    assert pruned.system_attrs["ddp_pl:pruned"] is True
    assert len(pruned.system_attrs["ddp_pl:intermediate_value"]) == 2 == len(pruned.intermediate_values)
    result.close()
