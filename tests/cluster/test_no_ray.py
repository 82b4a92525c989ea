"""Without the flag nothing of Ray, and nothing of the room for clusters, is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hydra_tune.core.errors import SpecError

SEARCH = """
import sys
import hydra_tune as ht
ht.search(lambda trial: trial.suggest_float("x", 0, 1), trials=1, devices="cpu", progress=False)
print(sorted(name for name in sys.modules if name.partition(".")[0] == "ray" or "cluster" in name.split(".")[1:2]))
"""


def test_a_search_without_the_flag_imports_nothing_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", SEARCH], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "[]"


def test_without_ray_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra_tune.cluster.bridge_client import RayMembership

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r"pip install 'hydra-tune\[ray\]'"):
        RayMembership("auto")
