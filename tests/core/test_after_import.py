"""Callbacks that run when a module is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hydra_tune.core.after_import import after_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that has not been imported."""
    (tmp_path / "told_of.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "told_of", raising=False)
    return "told_of"


def test_a_module_is_told_of_once_it_is_imported_and_looks_as_ever(module: str) -> None:
    told: list[ModuleType] = []
    finders = list(sys.meta_path)
    after_import(module, told.append)
    assert importlib.util.find_spec(module) is not None
    assert not told, "looking for it is no import"
    imported = importlib.import_module(module)
    assert told == [imported]
    assert type(imported.__loader__).__module__ == "_frozen_importlib_external"
    assert imported.__spec__ is not None
    assert imported.__spec__.loader is imported.__loader__
    assert sys.meta_path == finders
    importlib.reload(imported)
    assert told == [imported]


def test_one_that_is_there_is_told_of_at_once(module: str) -> None:
    told: list[ModuleType] = []
    imported = importlib.import_module(module)
    after_import(module, told.append)
    assert told == [imported]


def test_a_module_that_fails_can_be_tried_again(module: str, tmp_path: Path) -> None:
    told: list[ModuleType] = []
    finders = list(sys.meta_path)
    (tmp_path / "told_of.py").write_text("raise ImportError\n")
    after_import(module, told.append)
    with pytest.raises(ImportError):
        importlib.import_module(module)
    (tmp_path / "told_of.py").write_text("value = 'another one'\n")
    importlib.invalidate_caches()
    assert importlib.import_module(module) in told
    assert sys.meta_path == finders
