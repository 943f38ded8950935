"""Real folders: columns by name, missing values, times, masks, and all that is wrong with a folder in one message."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy
import pyarrow
import pytest
import torch
from pyarrow import parquet

from timeloom.app.data import Reading, load, split
from timeloom.app.data.reading import filled
from timeloom.app.errors import MOST_TOLD, InputError

NAN = math.nan


def folder(path: Path, **files: str) -> str:
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name.replace("_csv", ".csv")).write_text(text)
    return str(path)


def test_columns_are_matched_by_their_names(tmp_path: Path) -> None:
    table = load(folder(tmp_path, a_csv="left,right\n1,2\n", b_csv="right,left\n4,3\n"))
    assert table.columns == ("left", "right")
    assert [record.values.tolist() for record in table.records] == [[[1, 2]], [[3, 4]]]


def test_capital_suffixes_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.CSV").write_text("x\n1\n")
    numpy.save(tmp_path / "b", numpy.array([2.0]))
    (tmp_path / "b.npy").rename(tmp_path / "b.NPY")
    assert [record.values.tolist() for record in load(str(tmp_path)).records] == [[[1]], [[2]]]


def test_chosen_columns_are_taken_in_the_order_asked_for(tmp_path: Path) -> None:
    source = folder(tmp_path, a_csv="when,x,note,y\n10:00,1,ok,2\n10:01,3,bad,4\n")
    table = load(source, Reading(("y", "x")))
    assert table.records[0].values.tolist() == [[2, 1], [4, 3]]
    with pytest.raises(InputError, match=r"no column 'z'; it has 'when', 'x', 'note', 'y'"):
        load(source, Reading(("z",)))
    numpy.save(tmp_path / "b.npy", numpy.array([[5.0, 6.0, 7.0]]))
    (tmp_path / "a.csv").unlink()
    assert load(source, Reading(("3", "1"))).records[0].values.tolist() == [[7, 5]]
    with pytest.raises(InputError, match="no column 'x'; the columns of an array are numbers, here 1 to 3"):
        load(source, Reading(("x",)))


def test_times_become_the_seconds_between_steps(tmp_path: Path) -> None:
    rows = "2024-03-01 10:00:00,5\n2024-03-01 10:00:30,6\n2024-03-01 10:02:00,7\n"
    table = load(folder(tmp_path, a_csv=f"t,x\n{rows}"), Reading(time="t"))
    assert table.records[0].values.tolist() == [[0, 5], [30, 6], [90, 7]]
    with pytest.raises(InputError, match="the times of 't' go back at step 1; sort the rows"):
        load(folder(tmp_path, a_csv="t,x\n5,1\n4,1\n"), Reading(time="t"))


def test_semicolons_and_decimal_commas_are_read(tmp_path: Path) -> None:
    table = load(folder(tmp_path, a_csv="x;y\n1,5;2\n-0,25;1e3\n"))
    assert table.records[0].values.tolist() == [[1.5, 2], [-0.25, 1000]]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("zero", [0, 1, 0, 0, 4, 0]),
        ("forward", [1, 1, 1, 1, 4, 4]),
        ("linear", [1, 1, 2, 3, 4, 4]),
        ("mean", [2.5, 1, 2.5, 2.5, 4, 2.5]),
    ],
)
def test_missing_values_are_filled(how: str, expected: list[float]) -> None:
    values = torch.tensor([[NAN, 1, NAN, NAN, 4, NAN], [1, 2, 3, 4, 5, 6]]).T
    found = filled(values, how, "a")  # type: ignore[arg-type]
    assert found[:, 0].tolist() == expected
    assert found[:, 1].tolist() == [1, 2, 3, 4, 5, 6]
    if how != "zero":
        with pytest.raises(InputError, match="column 1 has no value at all"):
            filled(torch.full((3, 1), NAN), how, "a")  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["", "NA", "nan", "null", "?"])
def test_words_for_a_missing_value(word: str, tmp_path: Path) -> None:
    source = folder(tmp_path, a_csv=f"x,y\n1,1\n{word},1\n3,1\n")
    assert load(source, Reading(fill="linear")).records[0].values[:, 0].tolist() == [1, 2, 3]
    with pytest.raises(InputError, match="a missing value at step 1, column 'x'; fill it with --fill"):
        load(source)


def test_all_problems_of_a_folder_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(
            folder(
                tmp_path, a_csv="x,y\n1,oops\n", b_csv="x,y\n1,2\n3\n", c_csv="", d_csv="t,x,y\n10:00,word,1\n",
                e_csv="x,y\n1,2\n",
            )
        )  # fmt: skip
    text = str(caught.value)
    assert text.splitlines()[0] == f"{tmp_path} has 5 problems:"
    for part in ("a.csv: the column 'y' holds text", "b.csv, line 3: 1 columns", "c.csv: the file is empty",
                 "d.csv: the column 't' holds times", "d.csv: the column 'x' holds text"):  # fmt: skip
        assert part in text


def test_files_are_told_of_with_their_series_and_labels(tmp_path: Path) -> None:
    """What can be read is checked although other files cannot, against the columns that most have."""
    index = "file,label\na.csv,u\nb.csv,v\nc.csv,u\nd.csv,v\nd.csv,u\nnone.csv,u\n"
    whole = "x,y\n1,2\n"
    source = folder(tmp_path, labels_csv=index, a_csv="x\n1\n", b_csv="x,y\n1,NA\n", c_csv="", d_csv=whole, e_csv=whole)
    with pytest.raises(InputError) as caught:
        load(source, labelled=True)
    text = str(caught.value)
    assert text.splitlines()[0] == f"{tmp_path} has 6 problems:"
    for part in ("c.csv: the file is empty", "none.csv: no such file", "a.csv: its columns are not those of b.csv",
                 "b.csv has a missing value", "d.csv is listed twice", "e.csv has no label; give it one"):  # fmt: skip
        assert part in text
    with pytest.raises(InputError) as caught:
        load(source)
    assert "no label" not in str(caught.value)  # predictions need none


def test_a_problem_of_many_files_is_told_once(tmp_path: Path) -> None:
    index = "file,label\n" + "".join(f"{i}.csv,a\n" for i in range(50))
    with pytest.raises(InputError) as caught:
        load(folder(tmp_path, labels_csv=index, other_csv="x\nNA\n"))
    first, *lines = str(caught.value).splitlines()
    assert first == f"{tmp_path} has 2 problems:"
    assert len(lines) == 2
    assert "0.csv: no such file" in lines[0]
    assert lines[0].endswith("(and 49 more alike: 1.csv, 2.csv, 3.csv, …)")
    different = {f"f{i}_csv": f"{'x' * i}\n1oops\n2\n3\n" for i in range(1, MOST_TOLD + 6)}
    with pytest.raises(InputError) as caught:
        load(folder(tmp_path / "different", **different))
    assert "… and " in str(caught.value).splitlines()[-1]


def test_a_problem_of_a_column_is_told_once_whatever_its_examples(tmp_path: Path) -> None:
    rows = "when,state,x\n2024-01-0{0} 10:00,on{0},1\n2024-01-0{0} 10:01,off{0},\n"
    with pytest.raises(InputError) as caught:
        load(folder(tmp_path, **{f"series {i}_csv": rows.format(i) for i in range(1, 6)}))
    first, *lines = str(caught.value).splitlines()
    assert first == f"{tmp_path} has 3 problems:"
    for line, part in zip(lines, ("the column 'when' holds times", "the column 'state' holds text",
                                  "series 1.csv has a missing value at step 1, column 'x'"), strict=True):  # fmt: skip
        assert part in line
        assert line.endswith("(and 4 more alike: series 2.csv, series 3.csv, series 4.csv, …)")


def test_lines_of_a_ts_file_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "a.ts"
    path.write_text("@classLabel true a b\n@data\n1,x:a\n1,2:a\n1,y:b\n1,2:c\n1,1e300:b\n")
    with pytest.raises(InputError) as caught:
        load(str(path))
    text = str(caught.value)
    assert "line 3: expected a number, got 'x' (and 1 more alike: line 5)" in text
    assert "line 6: the label 'c' is not among those of the header" in text
    assert "line 7: the column '1' has 1e+300 at step 1, and float32 ends at 3.4e+38" in text


TIMES = {"epoch": 1.7e9 + 60 * numpy.arange(10) ** 1.5, "rows": numpy.arange(10.0), "t": numpy.arange(10.0) ** 2}


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("suffix", ["csv", "npy"])
def test_columns_that_count_time_are_not_trained_on_unasked(name: str, suffix: str, tmp_path: Path) -> None:
    generator = numpy.random.default_rng(0)
    for i in range(4):
        values = numpy.stack([generator.normal(size=10), TIMES[name] + 1000 * i], axis=1)
        if suffix == "npy":
            numpy.save(tmp_path / f"{i}.npy", values)
        else:
            numpy.savetxt(tmp_path / f"{i}.csv", values, fmt="%.15g", delimiter=",", header=f"x,{name}", comments="")
    if (name, suffix) == ("t", "npy"):  # nothing but its name would tell
        load(str(tmp_path), labelled=True)
        return
    column, other = ("2", "1") if suffix == "npy" else (name, "x")
    with pytest.raises(InputError) as caught:
        load(str(tmp_path), labelled=True)
    assert f"the column {column!r} counts time or rows" in str(caught.value)
    assert f"leave it out with --columns {other}" in str(caught.value)
    assert ("--time" in str(caught.value)) == (suffix == "csv")
    assert load(str(tmp_path), Reading((column, other)), labelled=True).channels == 2  # asked for
    if suffix == "csv":
        load(str(tmp_path), Reading(time=name), labelled=True)
    load(str(tmp_path / f"0.{suffix}"))  # what a model was trained on is its own affair


def test_a_column_that_rises_in_some_series_is_no_time(tmp_path: Path) -> None:
    rising, other = "".join(f"{i},{i % 3}\n" for i in range(12)), "".join(f"{i % 5},{i % 3}\n" for i in range(12))
    load(folder(tmp_path, a_csv=rising, b_csv=other), labelled=True)


@pytest.mark.parametrize("suffix", ["csv", "npy", "parquet"])
def test_numbers_beyond_float32_are_told_in_one_line(suffix: str, tmp_path: Path) -> None:
    values = numpy.array([[1.0, 2.0], [3.0, -1e300]])
    for name in ("a", "b"):
        if suffix == "npy":
            numpy.save(tmp_path / f"{name}.npy", values)
        elif suffix == "parquet":
            parquet.write_table(pyarrow.table({"x": values[:, 0], "y": values[:, 1]}), tmp_path / f"{name}.parquet")
        else:
            numpy.savetxt(tmp_path / f"{name}.csv", values, delimiter=",", header="x,y", comments="")
    with pytest.raises(InputError) as caught:  # a warning of numpy's would be an error here
        load(str(tmp_path))
    column = "2" if suffix == "npy" else "y"
    assert f"the column {column!r} has -1e+300 at step 1, and float32 ends at 3.4e+38" in str(caught.value)
    assert str(caught.value).endswith(f"(and 1 more alike: b.{suffix})")


def test_series_that_cannot_be_used_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(folder(tmp_path, a_csv="x\n1\n\n", b_csv="x\ninf\n", c_csv="x\nNA\n", d_csv="x\n"))
    assert "b.csv has an infinite value" in str(caught.value)
    assert "c.csv has a missing value" in str(caught.value)
    assert "d.csv is empty" in str(caught.value)


def test_numbers_and_masks_of_steps(tmp_path: Path) -> None:
    files = {f"{i}_csv": f"x,target,mask\n1,{i},1\n2,,0\n3,5,1\n" for i in range(8)}
    parts = split(load(folder(tmp_path, **files)), 0.25, 0.25, 0)
    assert (parts.task, parts.classes) == ("tracking", ())
    target = parts.train.targets[0]
    assert target[2] == 5
    assert target.isnan().tolist() == [False, True, False]


def test_classes_of_masked_steps_do_not_count(tmp_path: Path) -> None:
    files = {f"{i}_csv": "x,label,mask\n1,a,1\n2,,0\n3,b,1\n" for i in range(8)}
    parts = split(load(folder(tmp_path, **files)), 0.25, 0.25, 0)
    assert parts.classes == ("a", "b")
    assert parts.train.targets[0].tolist() == [0, -100, 1]


def test_folds_test_every_series_once(tmp_path: Path) -> None:
    index = "file,label\n" + "".join(f"{i}.csv,{'ab'[i % 2]}\n" for i in range(11))
    table = load(folder(tmp_path, labels_csv=index, **{f"{i}_csv": "1\n2\n" for i in range(11)}))
    tested = []
    for fold in (1, 2, 3):
        parts = split(table, 0.2, 0.2, 0, fold=(fold, 3))
        assert not set(parts.test.names) & {*parts.train.names, *parts.valid.names}
        assert {int(target) for target in parts.test.targets} == {0, 1}
        tested += parts.test.names
    assert sorted(tested) == sorted(f"{i}.csv" for i in range(11))
    with pytest.raises(InputError, match="11 series for --folds 12"):
        split(table, 0.2, 0.2, 0, fold=(1, 12))


def test_links_and_what_is_no_file_stay(tmp_path: Path) -> None:
    """A link is followed, and a device is written into: neither is replaced by a file."""
    from timeloom.app.files import write_text

    real, link = tmp_path / "real.csv", tmp_path / "link.csv"
    real.write_text("old")
    link.symlink_to(real)
    write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
