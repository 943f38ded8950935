"""Where compiled kernels are kept between runs: a folder that nobody else can write to.

Files are called `NAME.SUM.SUFFIX`: NAME identifies what the file was built from (a digest of source, flags, compiler
and processor), SUM is a digest of its bytes. So a half-written file is never mistaken for a complete one, a file needs
no second one beside it, and concurrent builds do not interfere: each writes under a temporary name and moves the file
into place.

Loaded code runs with the user's rights. So folders and files that another user owns or may write to are ignored, and
new folders are made for their owner alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

LONGEST_UNUSED = 30 * 86400.0
"""Seconds after which a file that nobody loaded is removed."""
LARGEST = 512 * 2**20
"""Total bytes above which the least recently used files are removed."""
SAFE_FROM_SIZE = 86400.0
"""Seconds since its last use during which a file is not removed to free space: a run may be about to load it."""
LONGEST_BUILD = 3600.0
"""Seconds after which a file still under its temporary name counts as left by a process that died."""
OTHERS = stat.S_IWGRP | stat.S_IWOTH

Loaded = TypeVar("Loaded")


class CacheError(OSError):
    """No folder could be used; the message says what is wrong with each."""


def fetch(name: str, suffix: str, build: Callable[[Path], None], load: Callable[[Path], Loaded]) -> Loaded:
    """Load the kept file called `name` by `load(path)`, after `build(path)` has written it if there is none.

    A folder that is full, read-only, untrusted or mounted without execution is skipped for the next one. Raises
    CacheError if none is left; exceptions of `build` other than OSError propagate.
    """
    wrong: list[str] = []
    fit = list(_fit_folders(wrong))
    for folder in fit:
        for path in _whole(folder, name, suffix, wrong):
            try:
                return load(path)
            except OSError as error:  # a mount that runs no code, a library of another system
                wrong.append(f"{path}: {error}")
    for folder in fit:
        try:
            return load(_built(folder, name, suffix, build))
        except OSError as error:
            wrong.append(f"{folder}: {error.strerror or error}")
    raise CacheError(f"no place for compiled kernels (TIMELOOM_CACHE may name a folder): {'; '.join(wrong)}")


def fetch_bytes(name: str, suffix: str, build: Callable[[], bytes]) -> bytes:
    """The bytes kept under `name`, made by `build` if there are none; returned even where they cannot be kept."""
    made: list[bytes] = []

    def write(path: Path) -> None:
        made[:] = made or [build()]
        path.write_bytes(made[0])

    try:
        return fetch(name, suffix, write, Path.read_bytes)
    except CacheError:
        return made[0] if made else build()


def folders() -> Iterator[Path]:
    """Folders to try, best first; the name of the last one holds the user's id."""
    for root in (os.environ.get("TIMELOOM_CACHE"), os.environ.get("XDG_CACHE_HOME"), "~/.cache"):
        if root:
            with suppress(RuntimeError):  # a user without a home
                yield Path(root).expanduser() / "timeloom"
    yield Path(tempfile.gettempdir()) / f"timeloom-{_user()}"


def why_unsafe(path: Path) -> str | None:
    """Why another user may have written what lies at `path`, or None if nobody else can have."""
    if _user() < 0:  # a system without owners
        return None
    for place in (path, *path.parents):
        found = place.lstat()
        if found.st_uid in (_user(), 0):
            found = place.stat()  # a link of the user's own leads where the user wants
        sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_uid not in (_user(), 0):
            return f"{place} belongs to another user"
        # A parent folder may be group-writable: members of the group can only move what belongs to the user.
        if not sticky and found.st_mode & (OTHERS if place == path else stat.S_IWOTH):
            return f"others may write to {place} (chmod go-w it)"
    return None


def prune(folder: Path) -> None:
    """Remove files long unused or left half-written, and the least recently used ones beyond LARGEST bytes."""
    now, held = time.time(), []
    for path in folder.iterdir():
        with suppress(OSError):
            found = path.lstat()
            age = now - found.st_mtime
            if _TEMPORARY.fullmatch(path.name):
                limit = LONGEST_BUILD
            elif _KEPT.fullmatch(path.name):
                limit = LONGEST_UNUSED
            else:
                continue
            if age > limit:
                path.unlink()
            elif limit == LONGEST_UNUSED:
                held.append((age, found.st_size, path))
    total = sum(size for _, size, _ in held)
    for age, size, path in sorted(held, reverse=True):
        if total <= LARGEST or age < SAFE_FROM_SIZE:
            break
        with suppress(OSError):
            path.unlink()
            total -= size


_TEMPORARY = re.compile(r"building-.*")
_KEPT = re.compile(r"[\w-]+\.[0-9a-f]{16}\.\w+|cpu-[0-9a-f]{20}\.so")  # the second: version 0.1, without a digest


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else -1


def _fit_folders(wrong: list[str]) -> Iterator[Path]:
    """Folders that only this user can write to, made if missing; `wrong` collects why others are not used."""
    for folder in folders():
        try:
            _make(folder)
            reason = why_unsafe(folder)
        except OSError as error:
            reason = f"{folder}: {error.strerror or error}"
        if reason is None:
            yield folder
        else:
            wrong.append(reason)


def _make(folder: Path) -> None:
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def _whole(folder: Path, name: str, suffix: str, wrong: list[str]) -> Iterator[Path]:
    """Files of this name that may be loaded: the user's own, with bytes that match their digest."""
    for path in sorted(folder.glob(f"{name}.*.{suffix}")):
        try:
            plain = stat.S_ISREG(path.lstat().st_mode)
            reason = why_unsafe(path) if plain else f"{path} is not a plain file"
            whole = reason is None and path.name.split(".")[-2] == _sum(path)
        except OSError as error:  # removed by another process, or not to be read
            reason, whole = f"{path}: {error.strerror or error}", False
        if whole:
            _mark_used(path)
            yield path
        elif reason is None:
            with suppress(OSError):
                path.unlink()
        else:
            wrong.append(reason)


def _mark_used(path: Path) -> None:
    """Renew a file's time for `prune`; not at every load, and not where the folder is read-only."""
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > SAFE_FROM_SIZE / 2:
            os.utime(path)


def _built(folder: Path, name: str, suffix: str, build: Callable[[Path], None]) -> Path:
    handle, temporary = tempfile.mkstemp(dir=folder, prefix="building-", suffix=f".{suffix}")
    os.close(handle)
    try:
        build(Path(temporary))
        os.chmod(temporary, 0o700)
        path = folder / f"{name}.{_sum(Path(temporary))}.{suffix}"
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    prune(folder)
    return path


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
