"""Readers of the application: what a file says is what the trainer gets, and a bad file is told in one line."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy
import pyarrow
import pytest
import torch
from pyarrow import parquet

from timeloom.app.data import batches, examples, load, split
from timeloom.app.data.batches import collate, order
from timeloom.app.data.splits import PADDING
from timeloom.app.errors import InputError
from timeloom.app.named_options import split_spec, with_options
from timeloom.solvers import Shooting

TWO_CHANNELS = """# a comment
@problemName tiny
@timeStamps false
@univariate false
@classLabel true b a
@data
1,2,3:4,5,6:a
7,8:9,10:b
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_csv", ".csv").replace("_ts", ".ts")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_ts_of_two_channels_and_two_lengths(tmp_path: Path) -> None:
    table = load(str(write(tmp_path, a_ts=TWO_CHANNELS) / "a.ts"))
    assert table.task == "classification"
    assert [record.label for record in table.records] == ["a", "b"]
    assert table.records[0].values.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert table.records[1].values.tolist() == [[7, 9], [8, 10]]


def test_ts_with_timestamps_and_a_target(tmp_path: Path) -> None:
    text = "@timeStamps true\n@targetlabel true\n@data\n(2020-01-01 10:00:00,1.5),(2020-01-01 10:00:01,-2):0.25\n"
    table = load(str(write(tmp_path, a_ts=text) / "a.ts"))
    assert table.task == "regression"
    assert table.records[0].label == 0.25
    assert table.records[0].values.tolist() == [[1.5], [-2]]


def test_the_test_file_beside_the_training_file_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "Tiny_TRAIN.ts").write_text(TWO_CHANNELS)
    (tmp_path / "Tiny_TEST.ts").write_text(TWO_CHANNELS)
    for source in (tmp_path, tmp_path / "Tiny_TRAIN.ts"):
        assert [record.split for record in load(str(source)).records] == ["train", "train", "test", "test"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1,2,3\n", "line 1: expected a line that starts with @"),
        ("@classLabel true a b\n", "no @data line"),
        ("@classLabel true a b\n@data\n1,2,3:4,5:a\n", "line 3: channels of different lengths (3, 2)"),
        ("@classLabel true a b\n@data\n1,2,3:4,\n", "line 3: the label '4,' is not among those of the header"),
        ("@classLabel true a b\n@data\n1,x,3:a\n", "line 3: expected a number, got 'x'"),
        ("@classLabel true a b\n@data\n1,?,3:a\n", "line 3 has a missing value at step 1, column 1"),
        ("@classLabel true a b\n@data\n", "no series found"),
        ("@classLabel true a b\n@data\n1,2:a\n1,2:3,4:b\n", "line 4 has 2 channels"),
    ],
)
def test_a_bad_ts_file_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        load(str(write(tmp_path, a_ts=text) / "a.ts"))
    assert told in str(caught.value)


def test_folder_with_an_index_of_labels(tmp_path: Path) -> None:
    write(tmp_path, labels_csv="file,label,split\na.csv,up,train\nb.npy,down,test\n", a_csv="left,right\n1,2\n3,4\n")
    numpy.save(tmp_path / "b.npy", numpy.array([[5.0, 6.0]]))
    table = load(str(tmp_path))
    assert [(r.name, r.label, r.split, r.values.tolist()) for r in table.records] == [
        ("a.csv", "up", "train", [[1, 2], [3, 4]]),
        ("b.npy", "down", "test", [[5, 6]]),
    ]


def test_folder_with_numbers_to_predict(tmp_path: Path) -> None:
    table = load(str(write(tmp_path, labels_csv="file,target\na.csv,1.5\n", a_csv="1\n2\n")))
    assert table.task == "regression"
    assert table.records[0].label == 1.5


def test_folders_named_by_class(tmp_path: Path) -> None:
    table = load(str(write(tmp_path, up__a_csv="1\n2\n", down__a_csv="3\n")))
    assert [(r.name, r.label) for r in table.records] == [("down/a.csv", "down"), ("up/a.csv", "up")]


def test_a_label_at_every_step(tmp_path: Path) -> None:
    write(tmp_path, a_csv="x,label,y\n1,rest,2\n3,move,4\n")
    numpy.save(tmp_path / "b.npy", numpy.zeros((3, 2)))
    numpy.save(tmp_path / "b.labels.npy", numpy.array(["rest", "rest", "move"]))
    table = load(str(tmp_path))
    assert table.task == "labelling"
    assert [r.label for r in table.records] == [["rest", "move"], ["rest", "rest", "move"]]
    assert table.records[0].values.tolist() == [[1, 2], [3, 4]]


def test_a_folder_without_labels_cannot_be_trained_on(tmp_path: Path) -> None:
    table = load(str(write(tmp_path, a_csv="1\n2\n")))
    assert table.task is None
    with pytest.raises(InputError, match="no labels found"):
        split(table, 0.2, 0.2, 0)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a_csv": "1,2\n3\n"}, "line 2: 1 columns, expected 2"),
        ({"a_csv": "x,y\n1,5,2,25\n"}, "line 2: 4 columns, expected 2; are these decimal commas? Write points"),
        ({"a_csv": "x,y\n1.5,2.5,7.5\n"}, "line 2: 3 columns, expected 2; give every column a name"),
        ({"a_csv": "1,2\n3,\n"}, "missing value at step 1, column 2"),
        ({"a_csv": "x,y\n1,z\n"}, "the column 'y' holds text ('z', 1 different): leave it out with --columns"),
        ({"a_csv": "x\n1\n2\n3|4\n"}, "line 4: expected a number in the column 'x', got '3|4'"),
        ({"a_csv": 'x,y\n"1,5",2\n'}, "the column 'x' has a decimal comma ('1,5', line 2): write a point"),
        ({"a_csv": "x,y\n1.234.567,2\n"}, "the column 'x' has marks between thousands"),
        ({"a_csv": "t,x\n2024-01-01 10:00,2\n"}, "the column 't' holds times ('2024-01-01 10:00')"),
        ({"a_csv": "t,x\n31.12.2024,2\n"}, "the column 't' holds times ('31.12.2024')"),
        ({"a_csv": ",x\n0,2\n"}, "column 1 has no name (an index that was written along?)"),
        ({"a_csv": "x,x\n0,2\n"}, "several columns are named 'x'"),
        ({"a_csv": "x,y\n1,2\n", "b_csv": "x,z\n1,2\n"}, "it lacks 'y' and has 'z' more"),
        ({"a_csv": "x,y\n1,2\n", "b_csv": "1,2\n"}, "a.csv names its columns, b.csv does not"),
        ({"a_csv": "x,label,target\n1,a,2\n"}, "both a column 'label' and a column 'target'"),
        ({"a_csv": "x,target\n1,\n"}, "has no target at step 0; give it one, or 0 in a column 'mask'"),
        ({"a_csv": "x,target,mask\n1,,maybe\n"}, "the mask of step 0 is 'maybe'"),
        ({"a_csv": ""}, "the file is empty"),
        ({"a_csv": "x,y\n"}, "a.csv is empty"),
        ({"labels_csv": "file,label\na.csv,up\n"}, "a.csv: no such file"),
        ({"labels_csv": "name,class\na.csv,up\n"}, "expected the columns 'file' and 'label'"),
        ({"labels_csv": "file,label\na.csv,\n", "a_csv": "1\n"}, "line 2: no label"),
        ({"labels_csv": "file,target\na.csv,much\n", "a_csv": "1\n"}, "line 2: expected a number, got 'much'"),
        ({"labels_csv": "file,label,split\na.csv,up,dev\n", "a_csv": "1\n"}, "split must be train, valid or test"),
        ({"labels_csv": "file,label\na.csv,up\na.csv,up\n", "a_csv": "1\n"}, "a.csv is listed twice"),
        ({"a_csv": "x,label\n1,up\n", "b_csv": "x\n1\n"}, "b.csv and a.csv are labelled differently"),
        ({}, "no .csv, .npy or .parquet files"),
    ],
)
def test_a_bad_folder_is_told_with_its_place(tmp_path: Path, files: dict[str, str], told: str) -> None:
    with pytest.raises(InputError) as caught:
        load(str(write(tmp_path, **files)))
    assert told in str(caught.value)


def test_half_an_array_is_told(tmp_path: Path) -> None:
    numpy.save(tmp_path / "a.npy", numpy.zeros((50, 2)))
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"not a whole \.npy file"):
        load(str(tmp_path))


def test_the_built_in_task_is_the_same_every_time() -> None:
    one, other = load("turning:length=128,train=4,valid=2,test=2"), load("turning:length=128,train=4,valid=2,test=2")
    assert len(one.records) == 8
    for a, b in zip(one.records, other.records, strict=True):
        assert a.values.shape == (128, 4)
        assert torch.equal(a.values, b.values)
    drawn_otherwise = load("turning:length=128,train=4,valid=2,test=2,seed=1")
    assert not torch.equal(one.records[0].values, drawn_otherwise.records[0].values)
    train, test = one.records[0].values, one.records[6].values
    assert not torch.equal(train, test)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("nowhere/data.ts", "no such file or folder"),
        ("turning:length=many", "length='many' is not a whole number"),
        ("turning:size=3", "turning has no option 'size'; it has: length, train"),
        ("turning:length", "expected name:option=value"),
        ("turning:length=3", "length must be at least 64"),
        ("EigenWorms:length=3", "takes no options"),
    ],
)
def test_a_source_that_is_not_there_is_told(source: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        load(source)
    assert told in str(caught.value)


def stand_in_for_aeon(monkeypatch: pytest.MonkeyPatch, **contents: object) -> None:
    """aeon itself is too large to install for two calls."""
    package, datasets = types.ModuleType("aeon"), types.ModuleType("aeon.datasets")
    vars(datasets).update(contents)
    monkeypatch.setitem(sys.modules, "aeon", package)
    monkeypatch.setitem(sys.modules, "aeon.datasets", datasets)


def test_a_set_of_the_archive_without_aeon_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aeon", None)
    with pytest.raises(InputError, match=r"pip install 'timeloom\[archive\]'"):
        load("EigenWorms")


def test_a_set_of_the_archive_comes_with_its_official_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_classification(name: str, split: str) -> tuple[object, object]:
        assert name == "Tiny"
        if split == "train":
            return numpy.arange(12.0).reshape(2, 2, 3), numpy.array(["a", "b"])  # series, channels, steps
        return [numpy.zeros((2, 5)), numpy.ones((2, 4))], numpy.array(["b", "a"])  # of unequal lengths: a list

    stand_in_for_aeon(monkeypatch, load_classification=load_classification)
    records = load("Tiny").records
    assert [(r.split, r.label, tuple(r.values.shape)) for r in records] == [
        ("train", "a", (3, 2)), ("train", "b", (3, 2)), ("test", "b", (5, 2)), ("test", "a", (4, 2)),
    ]  # fmt: skip
    assert records[0].values.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_an_archive_out_of_reach_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_classification(name: str, split: str) -> None:
        raise OSError("no route to host")

    stand_in_for_aeon(monkeypatch, load_classification=load_classification)
    with pytest.raises(InputError, match=r"could not load 'Tiny' \(OSError: no route to host\)"):
        load("Tiny")


def many(tmp_path: Path, count: int = 20) -> Path:
    index = ["file,label"]
    for i in range(count):
        (tmp_path / f"s{i}.csv").write_text(f"{i}\n" * (3 + i % 4))
        index.append(f"s{i}.csv,{'10' if i % 4 else '9'}")
    (tmp_path / "labels.csv").write_text("\n".join(index))
    return tmp_path


def test_splits_share_nothing_and_hold_every_class(tmp_path: Path) -> None:
    made = split(load(str(many(tmp_path))), 0.2, 0.25, seed=3)
    parts = [set(part.names) for part in (made.train, made.valid, made.test)]
    assert sum(len(part) for part in parts) == len(set.union(*parts)) == 20
    assert made.classes == ("9", "10")  # as numbers, not as text
    for part in (made.train, made.valid, made.test):
        assert {int(target) for target in part.targets} == {0, 1}
    assert len(made.test) == 5
    again = split(load(str(tmp_path)), 0.2, 0.25, seed=3)
    assert [part.names for part in (again.train, again.test)] == [part.names for part in (made.train, made.test)]


def test_unknown_labels_and_single_classes_are_told(tmp_path: Path) -> None:
    table = load(str(many(tmp_path)))
    with pytest.raises(InputError, match="has the label '9', which is none of 10, 11"):
        examples(table.records, "classification", ["10", "11"], "here")
    write(tmp_path, labels_csv="file,label\n" + "".join(f"s{i}.csv,up\n" for i in range(20)))
    with pytest.raises(InputError, match="all training series have the label 'up'"):
        split(load(str(tmp_path)), 0.2, 0.2, 0)


def test_batches_pad_and_say_the_lengths(tmp_path: Path) -> None:
    table = load(str(many(tmp_path, 6)))
    data = examples(table.records, "classification", ["9", "10"], "here")
    batch = collate(data, [0, 3])  # 3 and 6 steps
    assert batch.inputs.shape == (6, 2, 1)
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [3, 6]
    assert batch.inputs[3:, 0].abs().sum() == 0
    assert collate(data, [0, 4]).lengths is None
    assert list(batches(6, 4)) == [[0, 1, 2, 3], [4, 5]]


def test_step_labels_are_padded_with_what_losses_leave_out(tmp_path: Path) -> None:
    write(tmp_path, a_csv="x,label\n1,u\n2,v\n", b_csv="x,label\n1,v\n")
    data = examples(load(str(tmp_path)).records, "labelling", ["u", "v"], "here")
    assert collate(data, [0, 1]).targets.tolist() == [[0, 1], [1, PADDING]]
    second = collate(data, [0, 1], slice(1, 2))
    assert second.targets.tolist() == [[1, PADDING]]
    assert second.inputs.tolist() == [[[2.0], [0.0]]]
    assert second.lengths is not None
    assert second.lengths.tolist() == [2, 1]


def test_the_order_of_an_epoch_is_a_function_of_seed_and_epoch() -> None:
    assert order(50, 1, 2) == order(50, 1, 2)
    assert order(50, 1, 2) != order(50, 1, 3)
    assert order(50, 1, 2) != order(50, 2, 2)
    assert sorted(order(50, 1, 2)) == list(range(50))


def test_specs_are_read_by_the_types_of_the_options() -> None:
    name, options = split_spec("shooting:chunk=64,tol=1e-3,correction=newton,warmup=none")
    assert name == "shooting"
    assert with_options(Shooting(warmup=3), options, name) == Shooting(chunk=64, tol=1e-3, correction="newton")
    with pytest.raises(InputError, match="correction='best' is not one of auto, none, diag, secant, lowrank, newton"):
        with_options(Shooting(), {"correction": "best"}, "shooting")
    with pytest.raises(InputError, match="tol must be a positive number"):
        with_options(Shooting(), {"tol": "-1"}, "shooting")


def write_parquet(path: Path, **columns: list[object]) -> None:
    parquet.write_table(pyarrow.table(columns), path)


def test_parquet_files_are_series_too(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    (tmp_path / "down").mkdir()
    write_parquet(tmp_path / "up" / "a.parquet", x=[1.0, 2.0], y=[3, 4], on=[True, False])
    write_parquet(tmp_path / "down" / "b.parquet", x=[5.0], y=[6], on=[False])
    table = load(str(tmp_path))
    assert [(r.name, r.label) for r in table.records] == [("down/b.parquet", "down"), ("up/a.parquet", "up")]
    assert table.records[1].values.tolist() == [[1, 3, 1], [2, 4, 0]]


def test_parquet_with_a_label_at_every_step(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", x=[1.0, 2.0], label=["rest", "run"])
    table = load(str(tmp_path))
    assert table.task == "labelling"
    assert table.records[0].label == ["rest", "run"]


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"x": [1.0, None]}, "has a missing value at step 1, column 'x'"),
        ({"x": [1.0], "name": ["a"]}, "the column 'name' holds string, expected numbers"),
        ({"label": ["a"]}, "no columns of numbers"),
        ({"x": [1.0, 2.0], "label": ["a", None]}, "has no label at step 1"),
    ],
)
def test_a_bad_parquet_file_is_told(tmp_path: Path, columns: dict[str, list[object]], told: str) -> None:
    write_parquet(tmp_path / "a.parquet", **columns)
    with pytest.raises(InputError) as caught:
        load(str(tmp_path / "a.parquet"))
    assert told in str(caught.value)


def test_half_a_parquet_file_is_told(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", x=[float(i) for i in range(1000)])
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="not a whole Parquet file"):
        load(str(tmp_path))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", x=[1.0])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install 'timeloom\[parquet\]'"):
        load(str(tmp_path))


def test_pooled_data_are_split_anew(tmp_path: Path) -> None:
    index = ["file,label,split"]
    for i in range(40):
        (tmp_path / f"s{i}.csv").write_text(f"{i}\n" * 3)
        index.append(f"s{i}.csv,{'ab'[i % 2]},{'train' if i < 20 else 'test'}")
    (tmp_path / "labels.csv").write_text("\n".join(index))
    table = load(str(tmp_path))
    assert len(split(table, 0.25, 0.2, seed=0).test) == 20
    pooled = split(table, 0.25, 0.2, seed=0, pool=True)
    assert (len(pooled.train), len(pooled.valid), len(pooled.test)) == (24, 8, 8)
    names = {*pooled.train.names, *pooled.valid.names, *pooled.test.names}
    assert names == {record.name for record in table.records}
