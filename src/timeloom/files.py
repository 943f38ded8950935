"""Files that are either whole or not there, whenever the process may die."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from timeloom.errors import InputError


def write_whole(path: Path, data: bytes) -> None:
    """Fill a new file beside `path`, make sure that it is on the disk, and move it into place."""
    try:
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
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}. The file that was there before is whole: make room, and "
            f"run it again (a training goes on with --resume)"
        ) from error
    _keep_name(path.parent)


def write_text(path: Path, text: str) -> None:
    """The same for text."""
    write_whole(path, text.encode())


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
