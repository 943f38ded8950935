"""Files that are either whole or not there, whenever the process may die."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from timeloom.app.errors import InputError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a full share of it, a file grown beyond what is allowed."""


def write_whole(path: Path, data: bytes) -> None:
    """Fill a new file beside `path`, make sure that it is on the disk, and move it into place. A link leads to the file
    that is replaced; what is no file, as a terminal or a pipe, is written into.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path = path.resolve()
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            os.chmod(temporary, 0o666 & ~_umask())  # as any new file: others may read the report
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except BrokenPipeError:  # its reader has enough
        raise
    except OSError as error:
        whole = "The file that was there before is whole: " if path.is_file() else ""
        todo = "make room" if error.errno in NO_ROOM else "name a file in a folder that can be written to"
        raise InputError(f"cannot write {path}: {error.strerror or error}. {whole}{todo}, and run it again") from error
    _keep_name(path.parent)


def need_folder(path: Path) -> None:
    """Tell before the work, not after it, that a file cannot be written where it is to go."""
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file in it")


def write_text(path: Path, text: str) -> None:
    """The same for text."""
    write_whole(path, text.encode())


def write_json(path: Path, values: Any) -> None:
    """The same for numbers and texts. What is not a finite number is null: JSON has no NaN."""
    write_text(path, json.dumps(finite(values), indent=2, allow_nan=False) + "\n")


def finite(values: Any) -> Any:
    """The same with None in the place of numbers that are not finite."""
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _umask() -> int:
    """What the user keeps from others; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _keep_name(folder: Path) -> None:
    """Make sure that the new name itself is on the disk, where the system lets a folder be synchronised."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
