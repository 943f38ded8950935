"""The official split files of HMDB51: for each class and each of three splits a file `<class>_test_split<k>.txt`.

A line is the name of a clip and 1 (to train on), 2 (to test on) or 0 (left out).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from timeloom.app.data.records import Split
from timeloom.app.errors import InputError
from timeloom.app.video.clips import SPLITS, Clip

PARTS: dict[str, Split | None] = {"0": None, "1": "train", "2": "test"}


def find_splits(folder: Path) -> Path:
    """The folder of split files that lies in or beside a folder of clips."""
    for place in (folder / SPLITS, folder.parent / SPLITS):
        if place.is_dir():
            return place
    raise InputError(
        f"{folder}: no split files: put the folder {SPLITS} beside it, name another by --data "
        f"video:{folder},splits=FOLDER, or take splits=random there, which holds back --test-fraction of the clips"
    )


def assign(clips: Iterable[Clip], folder: Path, number: int) -> list[Clip]:
    """The clips that a split trains or tests on, told which."""
    by_class: dict[str, list[Clip]] = {}
    for clip in clips:
        by_class.setdefault(str(clip.label), []).append(clip)
    chosen: list[Clip] = []
    for label, members in by_class.items():
        path = folder / f"{label}_test_split{number}.txt"
        listed = read_split(path)
        for name in listed.keys() - {clip.path.name for clip in members}:
            raise InputError(f"{path}: names {name!r}, which is not in {members[0].path.parent}; add the clip there")
        for clip in members:
            if clip.path.name not in listed:
                raise InputError(f"{path}: does not name {clip.path}; add it (with 0 to leave it out) or remove it")
            part = listed[clip.path.name]
            if part is not None:
                chosen.append(replace(clip, split=part))
    return chosen


def read_split(path: Path) -> dict[str, Split | None]:
    """The part of every clip that a file names; None for those left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"{path}: no such split file; add it, choose another split= or leave out its class") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({error})") from None
    parts: dict[str, Split | None] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, _, part = line.strip().rpartition(" ")
        if part not in PARTS or not name.strip():
            raise InputError(f"{path}, line {number}: expected a clip's name and 0, 1 or 2, got {line.strip()[:60]!r}")
        parts[name.strip()] = PARTS[part]
    if not parts:
        raise InputError(f"{path}: the file is empty; get it again")
    return parts
