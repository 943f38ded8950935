"""From what the user names to the series behind it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

from timeloom.app.data.archive import from_archive
from timeloom.app.data.folder import INDEX, READERS, read_folder, read_series
from timeloom.app.data.reading import EVERYTHING, Reading, filled
from timeloom.app.data.records import Split, Table
from timeloom.app.data.ts import read_ts
from timeloom.app.data.turning_task import Turning, turning
from timeloom.app.data.uci_har import holds_uci_har, read_uci_har
from timeloom.app.errors import InputError
from timeloom.app.named_options import split_spec, with_options


def prepare(source: str, index: int, count: int) -> None:
    """One of `count` processes' share of what is costly to read, kept for all of them: the features of clips."""
    if source.startswith("video:") and count > 1:
        from timeloom.app.video import prepare_video

        prepare_video(source.removeprefix("video:"), index, count)


def load(source: str, reading: Reading = EVERYTHING, labelled: bool = False) -> Table:
    """Series from `turning[:options]`, `video:FOLDER`, a file, a folder, or a set's name in the archive.

    reading: which columns of files to take, and what to do with missing values.
    labelled: whether every series needs a label.

    A file is a `.ts`, `.csv`, `.npy` or `.parquet`. With `NAME_TRAIN.ts` goes the `NAME_TEST.ts` beside it.
    """
    if source.startswith("video:"):
        from timeloom.app.video import load_video  # its libraries are heavy

        return load_video(source.removeprefix("video:")).checked(labelled)
    path = Path(source)
    holds_columns = path.suffix.lower() in READERS or (path.is_dir() and not any(path.glob("*.ts")))
    if (reading.columns or reading.time) and not holds_columns:
        raise InputError(f"{source} has no columns to choose from; --columns and --time are for folders of files")
    if path.is_dir():
        pairs = sorted(path.glob("*_TRAIN.ts")) or sorted(path.glob("*.ts"))
        if len(pairs) > 1:
            raise InputError(f"{path}: several sets ({', '.join(p.name for p in pairs)}); give the path of one file")
        if not pairs and not (path / INDEX).is_file():
            from timeloom.app.video import Video, holds_clips, read_clips

            if holds_clips(path):
                return read_clips(path, Video()).checked(labelled)
        if holds_uci_har(path):
            return _filled(read_uci_har(path, reading), reading).checked(labelled)
        return (_read_archive_files(pairs[0], reading) if pairs else read_folder(path, reading)).checked(labelled)
    if path.suffix == ".ts" and path.is_file():
        return _read_archive_files(path, reading).checked(labelled)
    if path.suffix.lower() in READERS and path.is_file():
        return Table(source, None, [read_series(path, reading)]).checked(labelled)
    if ":" not in source and (path.suffix or "/" in source):
        raise InputError(f"{source}: no such file or folder")
    name, options = split_spec(source)
    if name == "turning":
        return turning(with_options(Turning(), options, name))
    if options:
        raise InputError(f"{name!r} takes no options; only the built-in task 'turning' does")
    return _filled(from_archive(name), reading).checked(labelled)


def _read_archive_files(path: Path, reading: Reading) -> Table:
    files: list[tuple[Path, Split | None]] = [(path, None)]
    if path.stem.endswith("_TRAIN"):
        files = [(path, "train")]
        beside = path.with_name(path.name.replace("_TRAIN.ts", "_TEST.ts"))
        if beside.is_file():
            files.append((beside, "test"))
    tables = [read_ts(file, split) for file, split in files]
    records = list(chain.from_iterable(table.records for table in tables))
    problems = tuple(chain.from_iterable(table.problems for table in tables))
    return _filled(Table(str(path), tables[-1].task, records, problems), reading)


def _filled(table: Table, reading: Reading) -> Table:
    records = [replace(r, values=filled(r.values, reading.fill, r.name)) for r in table.records]
    return replace(table, records=records)
