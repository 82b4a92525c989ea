"""Data from a function in a user's Python file, named `file.py:function`.

The function takes no arguments and returns `(train, valid)`, two map-style datasets of `(inputs, targets)`, or a
`Data`, which is used unchanged. For two datasets, task and shapes are inferred from the first sample and all targets.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.search_spaces.dataset import Data, Kind, Task


def call_file_function(source: str) -> Data:
    """Run `file.py:function` and describe its result as `Data`."""
    function = _function(source)
    returned = function()
    if isinstance(returned, Data):
        return returned
    if not (isinstance(returned, tuple | list) and len(returned) == 2 and all(map(_is_dataset, returned))):
        raise SpecError(f"{source} returned {quoted(returned)}", "return (train, valid) datasets, or a Data")
    train, valid = returned
    return _described(source, train, valid)


def _function(source: str) -> Callable[[], Any]:
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise SpecError(f"there is no file {quoted(file)}", "give an existing path, as in data.py:make_data")
    module_name = f"hydra_tune_data_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None, "a .py file always has a spec"
    assert spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickled samples look their module up by name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise SpecError(f"{file} failed on import: {type(error).__name__}: {error}", "run it with python") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise SpecError(f"{file} has no function {quoted(name)}", nearest(name, functions))
    return function  # type: ignore[no-any-return]


def _is_dataset(value: object) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str)


def _described(source: str, train: Any, valid: Any) -> Data:
    for part, dataset in (("train", train), ("valid", valid)):
        if not len(dataset):
            raise SpecError(f"the {part} part of data {source!r} has no rows", "give at least one")
    inputs = train[0][0]
    if not isinstance(inputs, torch.Tensor):
        raise SpecError(f"{source} has inputs of type {type(inputs).__name__}", "give tensors, or return a Data")
    train_targets, valid_targets = _targets(train), _targets(valid)
    task = _task(inputs, train_targets)
    if task == "regression":
        if train_targets.ndim != 2:
            raise SpecError(f"{source} has targets of shape {tuple(train_targets.shape[1:])}", "give the shape (n,)")
        outputs = train_targets.shape[1]
        variance = float(valid_targets.var(dim=0, correction=0).mean()) or 1.0
    else:
        outputs = int(max(train_targets.max(), valid_targets.max())) + 1
        variance = 1.0
    return Data(
        name=source,
        task=task,
        kind=_kind(source, inputs),
        train=train,
        valid=valid,
        input_shape=tuple(inputs.shape),
        outputs=outputs,
        target_variance=variance,
    )


def _targets(dataset: Any) -> torch.Tensor:
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1]
    return torch.stack([torch.as_tensor(dataset[index][1]) for index in range(len(dataset))])


def _task(inputs: torch.Tensor, targets: torch.Tensor) -> Task:
    if targets.is_floating_point():
        return "regression"
    return "language" if targets.ndim == 2 and not inputs.is_floating_point() else "classification"


def _kind(source: str, inputs: torch.Tensor) -> Kind:
    if not inputs.is_floating_point() and inputs.ndim == 1:
        return "tokens"
    kinds: dict[int, Kind] = {1: "features", 2: "sequence", 3: "image"}
    if inputs.ndim not in kinds:
        raise SpecError(f"{source} has inputs of shape {tuple(inputs.shape)}", "give 1, 2 or 3 dimensions")
    return kinds[inputs.ndim]
