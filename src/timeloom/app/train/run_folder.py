"""The folder of a run: its files, and that no two trainings write to one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from timeloom.app.errors import InputError
from timeloom.app.train import checkpoint
from timeloom.app.train.checkpoint import LAST
from timeloom.app.train.run_files import folds_of


def new_folder(data: str, out: str) -> Path:
    """Where a new run goes: the folder asked for, or a new one in runs/ that no other run has."""
    if out:
        folder = Path(out)
        refuse_taken(folder)
        return folder
    name = Path(data.partition(":")[0]).stem or "run"
    stem = Path(f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}")
    for number in range(1, 1000):
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from None
        return folder
    raise InputError(f"{stem} and all folders of its name are taken; choose another --out")


def refuse_taken(folder: Path) -> None:
    """A folder in which a training got somewhere is not begun anew."""
    if folds_of(folder):
        raise InputError(f"{folder} holds folds already: go on with --resume {folder}, or choose another --out")
    path = folder / LAST
    if path.exists() and checkpoint.load(path).progress.step:
        raise InputError(f"{folder} holds a run already: go on with --resume {folder}, or choose another --out")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Inside, no other training can write to the folder; whatever ends the process gives it free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from None
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # not on this system
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another training is writing to {folder}: wait for it, or choose another --out") from None
    except OSError:  # a file system without locks
        return
