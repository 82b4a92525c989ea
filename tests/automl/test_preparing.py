"""Tables of all kinds: how they are read, which rows encodings are learned from, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from hydra_tune.automl.encoder import Encoder, layout_for
from hydra_tune.automl.prepared import Prepared, assign_folds, prepare
from hydra_tune.automl.reading import read_table
from hydra_tune.automl.schema import Schema, kind_of
from hydra_tune.automl.target import make_target
from hydra_tune.core.errors import HydraTuneError
from tests.automl.tables import line, mixed


def prepared(frame, target, **options):
    return prepare(read_table(frame), target, **options)[0]


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (["a", "b"] * 20, "binary"),
        ([True, False] * 20, "binary"),
        ([0.0, 1.0] * 20, "binary"),
        (["a", "b", "c", "a"] * 10, "multiclass"),
        ([1, 2, 3, 4] * 10, "multiclass"),
        (list(range(40)), "regression"),
        ([1.5, 2.0, 3.25, 4.0] * 10, "regression"),
        ([1, 2, 3], "regression"),
    ],
)
def test_the_task_is_inferred(values, task):
    assert make_target(pd.Series(values, name="y"), "t").task == task


def test_the_task_can_be_stated():
    column = pd.Series([1, 2, 3, 4] * 10, name="y")
    assert make_target(column, "t", "regression").task == "regression"
    assert make_target(pd.Series([1, 2] * 9, name="y"), "t", "multiclass").task == "multiclass"
    with pytest.raises(HydraTuneError, match="4 classes"):
        make_target(column, "t", "binary")
    with pytest.raises(HydraTuneError, match="did you mean 'regression'"):
        make_target(column, "t", "regresion")
    with pytest.raises(HydraTuneError, match="holds 'x'"):
        make_target(pd.Series(["1", "x"], name="y"), "t", "regression")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2, 3], "number"),
        ([True, False], "number"),
        (["1.5", "2", "-3e4"], "number"),
        (["a", "b", "a"], "category"),
        (["2020-01-01", "2021-02-03"], "date"),
        (["03/04/2020 10:00", "05/06/2021 11:30"], "date"),
        (["2020-01-01T00:00:00Z", "2021-02-03T10:00:00Z"], "date"),
        ([f"word {i} and some more of them" for i in range(5)], "words"),
        ([f"x{i * 7919:05d}" for i in range(50)], "characters"),
        (["yes", "no"] * 30, "category"),
    ],
)
def test_kinds_of_columns(values, kind):
    assert kind_of(pd.Series(values))[0] == kind


def test_junk_among_numbers_counts_as_empty_and_is_said():
    frame = pd.DataFrame({"n": ["1", "2", "3", "4", "5", "6", "7", "8", "9", "?", "11"] * 4, "y": [0, 1] * 22})
    ready, notes = prepare(read_table(frame), "y")
    assert ready.schema.columns[0].kind == "number"
    assert ready.schema.columns[0].gaps
    assert any("4 cells count as empty" in note for note in notes)


def test_every_row_is_encoded_without_what_its_own_fold_says():
    """A value that only one fold has is unknown to that fold's encoder, and known to all others."""
    frame = mixed(60)
    ready = prepared(frame, "bought", folds=3, seed=0)
    fold = ready.targets[:, 2].numpy()
    rows = frame.drop(columns="bought")
    changed = rows.copy()
    changed.loc[fold == 1, "age"] = 1e6
    changed.loc[fold == 1, "city"] = "Atlantis"
    encoders = [Encoder.learn(ready.schema, changed[fold != i]) for i in range(3)]
    assert np.array_equal(encoders[1].numbers.quantiles, ready.encoders[1].numbers.quantiles)
    assert encoders[1].categories == ready.encoders[1].categories
    assert "Atlantis" in encoders[0].categories[0]
    assert not np.array_equal(encoders[0].numbers.quantiles, ready.encoders[0].numbers.quantiles)


def test_target_scales_are_those_of_the_training_rows():
    frame = line()
    ready = prepared(frame, "y", folds=4)
    fold, stored = ready.targets[:, 2], ready.targets[:, 0]
    for i in range(4):
        assert ready.scale.centres[i] == pytest.approx(float(stored[fold != i].mean()), abs=1e-6)
    assert ready.truth() == pytest.approx(frame["y"].to_numpy(), rel=1e-5)


def test_a_held_out_part_is_not_learned_from():
    frame = line(200)
    ready = prepared(frame, "y", folds=1)
    assert len(ready.judged_rows()) == 40
    assert len(ready.training_rows()) == 160
    known = frame["a"][(ready.targets[:, 2] == -1).numpy()]
    assert ready.encoders[0].numbers.quantiles[0, -1] == known.max()


def test_folds_have_their_share_of_every_class():
    target = make_target(pd.Series(["a"] * 90 + ["b"] * 10, name="y"), "t")
    fold = assign_folds(target, 5, seed=3)
    assert [int((fold[90:] == i).sum()) for i in range(5)] == [2] * 5
    assert not np.array_equal(fold, assign_folds(target, 5, seed=4))
    assert np.array_equal(fold, assign_folds(target, 5, seed=3))


def test_unseen_categories_missing_cells_and_far_values_are_encoded():
    frame = mixed()
    ready = prepared(frame, "bought")
    new = frame.drop(columns="bought").iloc[:3].copy()
    new["city"] = ["Paris", None, "Oslo"]
    new["age"] = [1e30, np.nan, -1e30]
    encoded = ready.encode(read_table(new))
    assert np.isfinite(encoded).all()
    codes = encoded[:, 0, ready.layout.codes().start]
    assert codes.tolist() == [1, 0, ready.encoders[0].categories[0]["Oslo"]]
    assert abs(encoded[:, :, : 2 * ready.layout.numbers]).max() < 100


def test_a_saved_table_encodes_as_before(tmp_path):
    frame = mixed()
    ready = prepared(frame, "bought")
    ready.save(tmp_path)
    again = Prepared.load(tmp_path)
    assert torch.equal(again.inputs, ready.inputs)
    assert again.labels == ("no", "yes")
    rows = read_table(frame.drop(columns="bought"))
    assert np.array_equal(again.encode(rows), ready.encode(rows))
    assert np.array_equal(ready.encode(rows), ready.inputs.numpy())
    (tmp_path / "encoders.safetensors").write_bytes(b"\x80\x04 not safetensors")
    with pytest.raises(HydraTuneError, match="is damaged"):
        Prepared.load(tmp_path)
    (tmp_path / "prepared.json").write_text(json.dumps({"name": 1}))
    with pytest.raises(HydraTuneError, match="is damaged"):
        Prepared.load(tmp_path)


def test_high_cardinality_is_capped_and_rare_ones_share_a_code():
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"zip": [f"z{int(n)}" for n in random.exponential(500, 6000)]})
    schema, _ = Schema.of(frame, "t")
    assert schema.columns[0].kind == "category"
    encoder = Encoder.learn(schema, frame)
    assert layout_for([encoder], len(frame)).categories[0] <= 1002
    rare = frame["zip"].value_counts().index[-1]
    assert rare not in encoder.categories[0]


def test_a_skewed_target_is_offered_on_a_log_scale():
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"a": random.normal(size=300), "y": random.lognormal(0, 2, 300)})
    scale = prepared(frame, "y").scale
    assert scale.unit is not None
    assert prepared(line(), "y").scale.unit is None
    answers = torch.zeros(2, len(scale.centres), 1)
    back = scale.towards_user(answers, log=True)
    expected = np.expm1(np.array(scale.log_centres)) * scale.unit
    assert back[0, :, 0].numpy() == pytest.approx(expected, rel=1e-4)


HOSTILE = {
    "no such column": (lambda: line(), "z", "has no column 'z'"),
    "one class": (lambda: line().assign(y="same"), "y", "has one value only"),
    "a constant number": (lambda: line().assign(y=1.5), "y", "has one value only"),
    "no target at all": (lambda: line().assign(y=np.nan), "y", "has no values"),
    "one column": (lambda: line()[["y"]], "y", "no column besides the target"),
    "only constant columns": (lambda: line()[["y"]].assign(a=1, b=None), "y", "no column that changes"),
    "no rows": (lambda: line().iloc[:0], "y", "has no rows"),
    "two rows": (lambda: line().iloc[:2], "y", "at least 3"),
    "a class for each row": (lambda: line().assign(y=[f"name {i}" for i in range(80)]), "y", "80 classes in 80 rows"),
    "columns twice": (lambda: pd.concat([line(), line()], axis=1), "y", "two columns"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", HOSTILE)
def test_what_cannot_be_fitted_gets_one_line(case):
    make, target, says = HOSTILE[case]
    with pytest.raises(HydraTuneError, match=says) as caught:
        prepared(make(), target)
    assert "\n" not in str(caught.value)


@pytest.mark.smoke
def test_what_is_odd_works_and_is_said():
    frame = line()
    frame.loc[3:5, "y"] = np.nan
    ready, notes = prepare(read_table(frame.assign(c=7)), "y")
    assert len(ready.targets) == 77
    assert any("3 of 80 rows have no 'y'" in note for note in notes)
    assert any("never change: 'c'" in note for note in notes)
    assert prepared(pd.DataFrame({"a": [1, 2, 3], "y": ["u", "v", "v"]}), "y").layout.folds == 3
    wide = pd.DataFrame(np.random.default_rng(0).normal(size=(50, 500)), columns=[f"c{i}" for i in range(500)])
    assert prepared(wide.assign(y=wide["c0"]), "y").layout.numbers == 500
    infinite = line().assign(a=[np.inf, -np.inf] * 40, c=range(80))
    assert np.isfinite(prepared(infinite, "y").inputs.numpy()).all()


class TestFiles:
    def test_utf8_with_a_mark_and_without(self, tmp_path):
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            mixed().to_csv(tmp_path / "t.csv", index=False, encoding=encoding)
            table = read_table(tmp_path / "t.csv")
            assert "Köln" in set(table.frame["city"])
            assert table.columns[0] == "age"
            assert not table.notes

    def test_other_bytes_are_read_as_windows_and_said(self, tmp_path):
        mixed().to_csv(tmp_path / "t.csv", index=False, encoding="cp1252")
        table = read_table(tmp_path / "t.csv")
        assert "Köln" in set(table.frame["city"])
        assert "not UTF-8" in table.notes[0]

    def test_bytes_of_no_text_are_refused(self, tmp_path):
        for content, says in ((b"a,y\n\x00\x01,2\n", "no text"), (b"a,y\n\x81\x8d,2\n", "neither UTF-8 nor")):
            (tmp_path / "t.csv").write_bytes(content)
            with pytest.raises(HydraTuneError, match=says):
                read_table(tmp_path / "t.csv")

    def test_semicolons_and_tabs(self, tmp_path):
        for separator in (";", "\t"):
            line().to_csv(tmp_path / "t.csv", index=False, sep=separator)
            table = read_table(tmp_path / "t.csv")
            assert table.columns == ["a", "b", "y"]
            assert table.notes

    def test_parquet(self, tmp_path):
        mixed().to_parquet(tmp_path / "t.parquet")
        assert prepared(tmp_path / "t.parquet", "bought").layout.categories

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("t.csv", b"", "is empty"),
            ("t.txt", b"a,y", "is no table"),
            ("t.parquet", b"a,y", "cannot be read as parquet"),
            ("t.npz", b"\x80\x04K\x01.", "cannot be read as .npz"),
        ],
    )
    def test_files_that_are_none(self, tmp_path, name, content, says):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(HydraTuneError, match=says):
            read_table(tmp_path / name)
        with pytest.raises(HydraTuneError, match="there is no file"):
            read_table(tmp_path / "absent.csv")

    def test_pickled_arrays_are_refused(self, tmp_path):
        np.savez(tmp_path / "t.npz", images=np.array([{}], dtype=object))
        with pytest.raises(HydraTuneError, match=r"cannot be read as \.npz"):
            read_table(tmp_path / "t.npz")

    def test_images_in_arrays(self, tmp_path):
        images = np.random.default_rng(0).random((30, 6, 5, 3))
        np.savez(tmp_path / "t.npz", images=images, labels=np.arange(30) % 3)
        ready = prepared(tmp_path / "t.npz", "labels")
        assert ready.layout.image == (3, 6, 5)
        assert ready.task == "multiclass"
        assert ready.inputs.shape == (30, 1, 90)
        np.savez(tmp_path / "t.npz", images=images[:5], labels=np.arange(30) % 3)
        with pytest.raises(HydraTuneError, match="5 images and 30 targets"):
            prepared(tmp_path / "t.npz", "labels")
