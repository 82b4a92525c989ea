"""Tables: columns become numbers, and unusable tables are refused with the reason."""

import numpy as np
import pytest
import torch

from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces import FamilyBuild
from hydra_tune.search_spaces.data import load

pd = pytest.importorskip("pandas")


def frame(rows=60):
    rng = np.random.default_rng(0)
    size = rng.normal(5.0, 2.0, rows)
    colour = rng.choice(["red", "green", "blue"], rows)
    return pd.DataFrame({"size": size, "colour": colour, "price": 3 * size + rng.normal(0, 0.1, rows)})


def test_a_csv_with_its_last_column_as_target():
    table = frame()
    table.to_csv("a table.csv", index=False)
    data = load("a table.csv")
    assert (data.task, data.kind, data.input_shape, data.outputs) == ("regression", "features", (4,), 1)
    assert len(data.train) == 48
    assert len(data.valid) == 12
    inputs, _ = data.train.tensors
    assert abs(inputs[:, 0].mean()) < 1e-5
    assert torch.equal(inputs[:, 1:].sum(dim=1), torch.ones(48))


def test_a_named_text_target_makes_a_classification():
    frame().to_csv("t.csv", index=False)
    data = load({"csv": "t.csv", "target": "colour"})
    assert (data.task, data.outputs, data.labels) == ("classification", 3, ("blue", "green", "red"))


def test_parquet_gives_the_same_as_csv():
    table = frame()
    table.to_csv("t.csv", index=False)
    table.to_parquet("t.parquet")
    one, other = load("t.csv"), load("t.parquet")
    assert torch.allclose(one.train.tensors[0], other.train.tensors[0])


def test_few_whole_numbers_are_classes_unless_told_otherwise():
    frame().assign(grade=np.arange(60) % 4).to_csv("t.csv", index=False)
    assert load("t.csv").task == "classification"
    assert load({"csv": "t.csv", "task": "regression"}).task == "regression"


def test_missing_cells_become_the_mean_or_no_category():
    table = frame()
    table.loc[3, "size"] = None
    table.loc[4, "colour"] = None
    table.to_csv("t.csv", index=False)
    data = load("t.csv")
    inputs = data.encoding.inputs(table)
    assert inputs[3, 0] == 0
    assert inputs[4, 1:].sum() == 0
    assert np.isfinite(inputs).all()


def test_statistics_come_from_the_training_rows_only():
    table = frame()
    table.to_csv("t.csv", index=False)
    before = load("t.csv").encoding
    valid_row = _a_row_of_the_validation_part(table)
    table.loc[valid_row, "size"] = 1e6
    table.loc[valid_row, "colour"] = "violet"
    table.to_csv("t.csv", index=False)
    assert load("t.csv").encoding == before


def _a_row_of_the_validation_part(table):
    from hydra_tune.search_spaces.dataset import split

    return int(split(len(table))[1][0])


def test_nullable_integers_and_booleans_of_parquet():
    table = frame().assign(
        rooms=pd.array([1, None, 3] * 20, dtype="Int64"), sold=pd.array([True, False] * 30, dtype="boolean")
    )
    table.to_parquet("t.parquet")
    data = load("t.parquet")
    assert data.task == "classification"
    assert data.input_shape == (6,)
    assert torch.isfinite(data.train.tensors[0]).all()


def test_a_family_can_be_searched_on_a_table():
    frame().to_csv("t.csv", index=False)
    build = FamilyBuild("mlp", {"csv": "t.csv", "target": "price"})
    assert build.task == "regression"


def junk(table):
    return table.astype({"size": object}).assign(size=[*table["size"][:-1], "abc"])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda t: t, {"target": "prize"}, "t.csv has no column 'prize' (did you mean 'price'?"),
        (lambda t: t[:0], {}, "t.csv has no rows (give at least 10)"),
        (lambda t: t[:5], {}, "t.csv has 5 rows (give at least 10)"),
        (lambda t: t[["price"]], {}, "t.csv has no column besides the target 'price'"),
        (junk, {}, "column 'size' of t.csv has 1 values that are not numbers, such as 'abc' in row 60"),
        (lambda t: t.assign(size=np.nan), {}, "column 'size' of t.csv is empty"),
        (lambda t: t.assign(size=np.inf), {}, "column 'size' of t.csv has infinite values"),
        (
            lambda t: t.assign(price=np.inf),
            {"task": "regression"},
            "column 'price' of t.csv has infinite values",
        ),
        (lambda t: t.assign(price=1), {}, "column 'price' of t.csv has one value only, np.int64(1)"),
        (
            lambda t: t.assign(price=t["price"].where(t.index != 2)),
            {},
            "column 'price' of t.csv has no value in row 3",
        ),
        (
            lambda t: t.assign(price=[f"p{i}" for i in t.index]),
            {},
            "column 'price' of t.csv has 60 classes in 60 rows",
        ),
        (
            lambda t: t,
            {"target": "colour", "task": "regression"},
            "column 'colour' of t.csv has 60 values that are",
        ),
        (lambda t: t, {"task": "sorting"}, "a table cannot have the task 'sorting'"),
    ],
)
def test_mistakes(change, options, message):
    change(frame()).to_csv("t.csv", index=False)
    with pytest.raises(SpecError) as refused:
        load({"csv": "t.csv", **options})
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_long_text_is_no_category():
    frame(300).assign(size=[f"note {i}" for i in range(300)]).to_csv("t.csv", index=False)
    with pytest.raises(SpecError, match="holds text with 240 different values"):
        load("t.csv")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"", "t.csv is empty"),
        ("t.csv", b"a,b\n1,2\n1,2,3,4\n", "t.csv cannot be read as csv: Error tokenizing data"),
        ("t.csv", b"\xff\xfe\x00", "t.csv cannot be read as csv"),
        ("t.parquet", b"not parquet", "t.parquet cannot be read as parquet"),
    ],
)
def test_files_that_are_no_tables(own_folder, name, content, message):
    (own_folder / name).write_bytes(content)
    with pytest.raises(SpecError) as refused:
        load(name)
    assert str(refused.value).startswith(message)


def test_a_folder_is_no_table(own_folder):
    (own_folder / "t.csv").mkdir()
    with pytest.raises(SpecError, match=r"t\.csv cannot be read as csv"):
        load("t.csv")


def test_a_changed_file_is_read_again():
    frame(60).to_csv("t.csv", index=False)
    assert len(load("t.csv").train) == 48
    frame(100).to_csv("t.csv", index=False)
    assert len(load("t.csv").train) == 80
