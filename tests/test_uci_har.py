"""UCI-HAR's folder is read, and its preset trains on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from timeloom.app import cli
from timeloom.app.data import Reading, load
from timeloom.app.data.uci_har import ACTIVITIES, SIGNALS
from timeloom.app.errors import InputError
from timeloom.app.train.config import preset

pytestmark = pytest.mark.usefixtures("one_thread")


def write(folder: Path, rows: int) -> Path:
    for part in ("train", "test"):
        signals = folder / part / "Inertial Signals"
        signals.mkdir(parents=True)
        for number, name in enumerate(SIGNALS):
            lines = [" ".join(f"{0.1 * number + row + 0.001 * t: .7e}" for t in range(128)) for row in range(rows)]
            (signals / f"{name}_{part}.txt").write_text("\n".join(lines) + "\n")
        (folder / part / f"y_{part}.txt").write_text("\n".join(str(1 + row % 6) for row in range(rows)) + "\n")
    return folder


def test_its_folder_is_read(tmp_path: Path) -> None:
    table = load(str(write(tmp_path, 7)))
    assert len(table.records) == 14
    assert table.records[0].values.shape == (128, 9)
    assert table.records[1].label == ACTIVITIES[1] == "walking upstairs"
    assert [record.split for record in table.records] == ["train"] * 7 + ["test"] * 7
    torch.testing.assert_close(table.records[2].values[5], 0.1 * torch.arange(9) + 2 + 0.005)
    chosen = load(str(tmp_path), Reading(("total_acc_z", "body_acc_x")))
    torch.testing.assert_close(chosen.records[2].values, table.records[2].values[:, [8, 0]])


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("train/y_train.txt", "1\n2\n", "as many labels are needed"),
        ("train/y_train.txt", "1\n2\n7\n", "activities are 1 to 6, got 1 to 7"),
        ("train/y_train.txt", "", "y_train.txt is not a table of numbers .it is empty"),
        ("test/y_test.txt", "1\nsitting\n3\n", "y_test.txt is not a table of numbers"),
        ("test/Inertial Signals/body_acc_x_test.txt", None, "body_acc_x_test.txt: no such file; give the folder"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, file: str, text: str | None, told: str) -> None:
    path = write(tmp_path, 3) / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError, match=told):
        load(str(tmp_path))


def test_columns_that_it_does_not_have(tmp_path: Path) -> None:
    write(tmp_path, 3)
    with pytest.raises(InputError, match="no column 'heart'; its columns are body_acc_x"):
        load(str(tmp_path), Reading(("heart",)))
    with pytest.raises(InputError, match="no column 'seconds'; all steps are 1/50 s"):
        load(str(tmp_path), Reading(time="seconds"))


def test_its_preset_trains(tmp_path: Path) -> None:
    config = preset("uci-har")
    assert (config.model.hidden, config.model.layers, config.optim.batch) == (100, 2, 100)
    given = [
        "--preset",
        "uci-har",
        "--data",
        str(write(tmp_path / "UCI HAR Dataset", 18)),
        "--out",
        str(tmp_path / "run"),
    ]
    small = ["--hidden", "4", "--epochs", "1", "--compare", "0", "--device", "cpu"]
    assert cli.run("train", [*given, *small, "--cell", "implicit-gru", "--solver", "mgrit-paper"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_quality"] is not None
