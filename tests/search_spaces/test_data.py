"""Data by name: the bundled sets, and functions in Python files."""

import numpy as np
import pytest
import torch

from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces.data import BUNDLED, Data, load
from hydra_tune.search_spaces.dataset import split

EXPECTED = {
    "digits": ("classification", "image", (1, 8, 8), 10, 1797),
    "breast_cancer": ("classification", "features", (30,), 2, 569),
    "wine": ("classification", "features", (13,), 3, 178),
    "diabetes": ("regression", "features", (10,), 1, 442),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_bundled_sets(name):
    data = load(name)
    task, kind, shape, outputs, rows = EXPECTED[name]
    assert (data.task, data.kind, data.input_shape, data.outputs) == (task, kind, shape, outputs)
    assert len(data.train) + len(data.valid) == rows
    inputs, targets = data.train.tensors
    assert inputs.dtype == torch.float32
    assert inputs.shape[1:] == shape
    assert targets.dtype == (torch.long if task == "classification" else torch.float32)
    assert abs(inputs.mean()) < 1e-4
    assert abs(inputs.std() - 1) < 0.01


def test_classes_are_in_proportion_in_both_parts():
    data = load("digits")
    shares = [torch.bincount(part.tensors[1]).float() / len(part) for part in (data.train, data.valid)]
    assert torch.allclose(*shares, atol=0.005)


def test_targets_of_a_regression_come_back_in_the_users_units():
    data = load("diabetes")
    everything = torch.cat([data.train.tensors[1], data.valid.tensors[1]]) * data.target_scale + data.target_mean
    assert everything.min().item() == pytest.approx(25, abs=1e-3)
    assert everything.max().item() == pytest.approx(346, abs=1e-3)


def test_text_predicts_the_next_character_and_validates_on_the_end():
    data = load({"name": "text", "characters": 5000, "block": 32})
    inputs, targets = data.train.tensors
    assert data.input_shape == (32,)
    assert torch.equal(inputs[0, 1:], targets[0, :-1])
    assert torch.equal(targets[:-1, -1], inputs[1:, 0])
    assert len(data.train) + len(data.valid) == 4999 // 32
    assert int(inputs.max()) < data.outputs == len(data.labels)


def test_the_same_object_is_given_each_time():
    assert load("wine") is load("wine")
    assert load({"name": "text", "block": 32}) is load({"block": 32, "name": "text"})
    assert load(load("wine")) is load("wine")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digit", "there is no data 'digit' (did you mean 'digits'?"),
        ("missing.csv", "there is no file 'missing.csv'"),
        ("missing.parquet", "there is no file 'missing.parquet'"),
        ("missing.py:make", "there is no file 'missing.py'"),
        (7, "data cannot be 7"),
        ({}, "data {} must have one of the keys name, csv, parquet"),
        (
            {"csv": "a.csv", "name": "digits"},
            "data {'csv': 'a.csv', 'name': 'digits'} must have one of the keys",
        ),
        ({"csv": 3}, "data has the csv 3"),
        ({"csv": "a.csv", "traget": "y"}, "data 'a.csv' has no option 'traget' (did you mean 'target'?"),
        ({"name": "text", "blokc": 3}, "data 'text' has no option 'blokc' (did you mean 'block'?"),
        ({"name": "digits", "block": 3}, "data 'digits' has no option 'block' (it takes none)"),
        ({"name": "text", "block": 0}, "data 'text' has block 0"),
        ({"name": "text", "characters": 100}, "data 'text' has only 1 blocks"),
    ],
)
def test_mistakes(spec, message):
    with pytest.raises(SpecError) as refused:
        load(spec)
    assert str(refused.value).startswith(message)


def test_every_class_with_two_rows_is_in_both_parts():
    classes = np.array([0] * 50 + [1] * 2 + [2])
    train, valid = split(len(classes), classes)
    assert set(classes[valid]) == {0, 1}
    assert set(classes[train]) == {0, 1, 2}
    assert sorted([*train, *valid]) == list(range(53))
    again = split(len(classes), classes)
    assert np.array_equal(train, again[0])
    assert np.array_equal(valid, again[1])


SOURCE = """
import torch
from torch.utils.data import Dataset, TensorDataset
from hydra_tune.search_spaces.data import Data

class Squares(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return torch.ones(4, 3) * i, i % 3

def classes():
    return Squares(), Squares()

def numbers():
    return (TensorDataset(torch.randn(9, 2, 8, 8), torch.randn(9, 2)),) * 2

def tokens():
    return (TensorDataset(torch.arange(20).view(4, 5), torch.arange(1, 21).view(4, 5)),) * 2

def described():
    part = TensorDataset(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long))
    given = dict(task="classification", kind="features", train=part, valid=part)
    return Data(name="mine", input_shape=(3,), outputs=9, **given)

def wrong():
    return 3

def flat():
    return (TensorDataset(torch.randn(9, 2), torch.randn(9)),) * 2

def empty():
    return [], []
"""


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("classes", ("classification", "sequence", (4, 3), 3)),
        ("numbers", ("regression", "image", (2, 8, 8), 2)),
        ("tokens", ("language", "tokens", (5,), 21)),
        ("described", ("classification", "features", (3,), 9)),
    ],
)
def test_functions_in_a_file(own_folder, function, expected):
    file = own_folder / "my data's.py"
    file.write_text(SOURCE)
    data = load(f"{file}:{function}")
    assert (data.task, data.kind, data.input_shape, data.outputs) == expected
    assert load(f"{file}:{function}") is data


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        (SOURCE, "wrong", "data.py:wrong returned 3 (return (train, valid) datasets, or a Data)"),
        (SOURCE, "clases", "data.py has no function 'clases' (did you mean 'classes'?"),
        (SOURCE, "flat", "data.py:flat has targets of shape () (give the shape (n,))"),
        (SOURCE, "empty", "the train part of data 'data.py:empty' has no rows"),
        ("import no_such_module", "f", "data.py failed on import: ModuleNotFoundError: No module named"),
    ],
)
def test_mistakes_in_a_file(own_folder, source, function, message):
    (own_folder / "data.py").write_text(source)
    with pytest.raises(SpecError) as refused:
        load(f"data.py:{function}")
    assert message in str(refused.value).replace("'data.py' ", "data.py ")


def test_data_is_checked():
    part = load("wine").train
    given = {"name": "x", "kind": "features", "train": part, "valid": part, "outputs": 3}
    with pytest.raises(SpecError, match="has the task 'sorting'"):
        Data(**given, task="sorting", input_shape=(13,))
    with pytest.raises(SpecError, match="of kind 'features' and shape"):
        Data(**given, task="classification", input_shape=(1, 13))
    with pytest.raises(SpecError, match="the valid part of data 'x' has no rows"):
        Data(**{**given, "valid": []}, task="classification", input_shape=(13,))


def test_every_bundled_set_describes_itself():
    assert all(function.__doc__ for function in BUNDLED.values())
