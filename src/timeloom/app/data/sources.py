"""From what the user names to the series behind it."""

from __future__ import annotations

from pathlib import Path

from timeloom.app.data.archive import from_archive
from timeloom.app.data.folder import INDEX, SUFFIXES, read_folder, read_series
from timeloom.app.data.records import Record, Split, Table
from timeloom.app.data.ts import read_ts
from timeloom.app.data.turning_task import Turning, turning
from timeloom.app.errors import InputError
from timeloom.app.named_options import split_spec, with_options


def load(source: str) -> Table:
    """Series from `turning[:options]`, `video:FOLDER`, a file, a folder, or a set's name in the archive.

    A file is a `.ts`, `.csv`, `.npy` or `.parquet`. With `NAME_TRAIN.ts` goes the `NAME_TEST.ts` beside it.
    """
    if source.startswith("video:"):
        from timeloom.app.video import load_video  # its libraries are heavy

        return load_video(source.removeprefix("video:")).checked()
    path = Path(source)
    if path.is_dir():
        pairs = sorted(path.glob("*_TRAIN.ts")) or sorted(path.glob("*.ts"))
        if len(pairs) > 1:
            raise InputError(f"{path}: several sets ({', '.join(p.name for p in pairs)}); give the path of one file")
        if not pairs and not (path / INDEX).is_file():
            from timeloom.app.video import Video, holds_clips, read_clips

            if holds_clips(path):
                return read_clips(path, Video()).checked()
        return (_read_archive_files(pairs[0]) if pairs else read_folder(path)).checked()
    if path.suffix == ".ts" and path.is_file():
        return _read_archive_files(path).checked()
    if path.suffix in SUFFIXES and path.is_file():
        return Table(source, None, [read_series(path)]).checked()
    if ":" not in source and (path.suffix or "/" in source):
        raise InputError(f"{source}: no such file or folder")
    name, options = split_spec(source)
    if name == "turning":
        return turning(with_options(Turning(), options, name))
    if options:
        raise InputError(f"{name!r} takes no options; only the built-in task 'turning' does")
    return from_archive(name).checked()


def _read_archive_files(path: Path) -> Table:
    files: list[tuple[Path, Split | None]] = [(path, None)]
    if path.stem.endswith("_TRAIN"):
        files = [(path, "train")]
        beside = path.with_name(path.name.replace("_TRAIN.ts", "_TEST.ts"))
        if beside.is_file():
            files.append((beside, "test"))
    task, records = None, list[Record]()
    for file, split in files:
        task, found = read_ts(file, split)
        records += found
    return Table(str(path), task, records)
