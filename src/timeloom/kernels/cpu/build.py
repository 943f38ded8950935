"""Loads C kernels: the package's own, from the wheel (`packaged.py`) or built here, and generated ones.

Libraries are built once, by the machine's compiler, and kept in the user's cache (`kernels/cache.py`) under a name with
a digest of source, flags, compiler and processor, so that a change of any of them rebuilds. With neither wheel nor
compiler sweeps run in torch, which costs only speed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from timeloom.kernels import cache, faults
from timeloom.kernels.cpu import packaged
from timeloom.kernels.cpu.packaged import SOURCES

HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = [*packaged.FLAGS, "-march=native", "-shared"]


class KernelBuildError(RuntimeError):
    """The C kernels could not be built or loaded; the message says why."""


def library() -> ctypes.CDLL:
    """The compiled kernels. Raises KernelBuildError if there are none; either answer is remembered."""
    answer = _load()
    if isinstance(answer, str):
        raise KernelBuildError(answer)
    return answer


def unavailable() -> str | None:
    """Why the C kernels cannot be used here, or None where they can."""
    answer = _load()
    return answer if isinstance(answer, str) else None


class _Checkout(ctypes.CDLL):
    """The package's own library, built here; the steps of cells are libraries of their own, built on first use."""

    def __getattr__(self, symbol: str) -> Any:
        from timeloom.kernels.cpu.texts import KERNELS, source  # not at the top: only checkouts need it

        kernel = KERNELS.get(symbol.removeprefix("timeloom_").rpartition("_")[0])
        if kernel is None:
            return super().__getattr__(symbol)
        found = getattr(_library("step", source(kernel).text), symbol)
        setattr(self, symbol, found)
        return found


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none; cached, as a failing compiler must not be called again on every sweep."""
    if os.environ.get("TIMELOOM_NATIVE", "1") == "0":
        return "switched off by TIMELOOM_NATIVE=0"
    try:
        loaded = packaged.library() or _library("cpu")
        loaded.timeloom_jump.restype = ctypes.c_float
        return loaded
    except (KernelBuildError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        faults.tell(f"no compiled kernels on this CPU ({first})", "sweeps run in torch: same results, slower")
        return str(error)


@functools.lru_cache(maxsize=256)
def generated(texts: tuple[str, ...], flags: tuple[str, ...] = ()) -> tuple[ctypes.CDLL, ...] | str:
    """The libraries of generated sources, compiled in parallel, or why one is missing; either answer is remembered."""
    reason = unavailable()
    if reason is not None:
        return reason
    with ThreadPoolExecutor(len(texts)) as pool:  # a thread waits for its compiler, which has a core of its own
        found = tuple(pool.map(_of_text, texts, repeat(flags)))
    reason = next((one for one in found if isinstance(one, str)), None)
    if reason is None:
        return tuple(one for one in found if not isinstance(one, str))
    first = reason.strip().splitlines()[0]
    faults.tell(f"a cell's step could not be compiled ({first})", "it runs in torch: same results, slower")
    return reason


@functools.lru_cache(maxsize=512)
def _of_text(text: str, flags: tuple[str, ...]) -> ctypes.CDLL | str:
    try:
        return _library("step", text, flags)
    except (KernelBuildError, OSError) as error:
        return str(error)


def _library(kind: str, text: str = "", flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library built from a generated source, or, without one, from the package's own sources."""
    compiler, machine = _toolchain()
    key = b"".join(file.read_bytes() for file in (*SOURCES, *HEADERS))
    key += repr((FLAGS, flags, compiler, machine, text)).encode()
    name = f"{kind}-{hashlib.sha256(key).hexdigest()[:20]}"
    build = functools.partial(_build, compiler, text=text, flags=flags) if text else functools.partial(_build, compiler)
    return cache.fetch(name, "so", build, _open if text else _open_own)


def _compiler() -> list[str]:
    for candidate in (os.environ.get("CC"), "cc", "gcc", "clang"):
        try:
            words = shlex.split(candidate) if candidate else []
        except ValueError as error:
            raise KernelBuildError(f"$CC is no command: {candidate!r} ({error})") from None
        if words and shutil.which(words[0]):
            return words
    raise KernelBuildError("no C compiler found (looked for $CC, cc, gcc, clang)")


@functools.cache
def _toolchain() -> tuple[list[str], str]:
    """The compiler, and a string that identifies its version and the processor."""
    compiler = _compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    processor = platform.processor() or platform.machine()
    flags = Path("/proc/cpuinfo")
    if flags.exists():
        processor += next((line for line in flags.read_text().splitlines() if line.startswith("flags")), "")
    return compiler, f"{version!r} {processor}"


def _build(compiler: list[str], path: Path, text: str = "", flags: tuple[str, ...] = ()) -> None:
    sources = ["-x", "c", "-"] if text else map(str, SOURCES)
    command = [*compiler, *FLAGS, *flags, f"-I{Path(__file__).parent}", *sources, "-o", str(path), "-lm"]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        why = f"{compiler[0]} failed: {done.stderr.strip()[:2000]}"
        full = next((code for code in (errno.ENOSPC, errno.EDQUOT) if os.strerror(code) in done.stderr), None)
        raise KernelBuildError(why) if full is None else OSError(full, why)


def _open(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _open_own(path: Path) -> ctypes.CDLL:
    return _Checkout(str(path))
