"""A search whose database is a real PostgreSQL server."""

from __future__ import annotations

import hydra_tune as ht
from hydra_tune.cli.app import run
from tests.candidates import build_small


def test_a_search_runs_and_resumes_on_postgresql(postgresql_url: str):
    options = {"study": "pg", "storage": postgresql_url, "devices": "2xcpu", "sampler": "random", "progress": False}
    first = ht.search(build_small, trials=2, seed=1, **options)
    values = [record.value for record in first.trials]
    assert first.best_model() is not None
    more = ht.search(build_small, trials=3, resume=True, **options)
    assert [record.value for record in more.trials][:2] == values
    assert run(["show", "pg", "2", "--storage", postgresql_url, "--json"]) == 0
    assert run(["doctor", "--storage", postgresql_url]) == 0
    first.close()
    more.close()
