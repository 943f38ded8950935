"""Loads the C kernels: those of the wheel (`packaged.py`), or else built once with the machine's own compiler.

What is built lands in the user's cache (`kernels/cache.py`) under a name that holds a digest of source, flags, compiler
and processor, so a change of any of them builds anew. Where there is no compiler, nothing is lost but speed: sweeps run
in torch.
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
from pathlib import Path

from timeloom.kernels import cache, faults
from timeloom.kernels.cpu import packaged
from timeloom.kernels.cpu.packaged import SOURCES

HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = [*packaged.FLAGS, "-march=native", "-shared"]


class KernelBuildError(RuntimeError):
    """The C kernels could not be built or loaded; the message says why."""


def library() -> ctypes.CDLL:
    """The compiled kernels. Raises KernelBuildError where they cannot be had; either answer is remembered."""
    answer = _load()
    if isinstance(answer, str):
        raise KernelBuildError(answer)
    return answer


def unavailable() -> str | None:
    """Why the C kernels cannot be used here, or None where they can."""
    answer = _load()
    return answer if isinstance(answer, str) else None


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none: a compiler that fails must not be called again on every sweep."""
    if os.environ.get("TIMELOOM_NATIVE", "1") == "0":
        return "switched off by TIMELOOM_NATIVE=0"
    try:
        loaded = packaged.library() or _built_here()
        loaded.timeloom_jump.restype = ctypes.c_float
        return loaded
    except (KernelBuildError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        faults.tell(f"no compiled kernels on this CPU ({first})", "sweeps run in torch: same results, slower")
        return str(error)


def _built_here() -> ctypes.CDLL:
    compiler = _compiler()
    return cache.fetch(f"cpu-{_digest(compiler)}", "so", functools.partial(_build, compiler), _open)


def _compiler() -> list[str]:
    for candidate in (os.environ.get("CC"), "cc", "gcc", "clang"):
        words = shlex.split(candidate) if candidate else []
        if words and shutil.which(words[0]):
            return words
    raise KernelBuildError("no C compiler found (looked for $CC, cc, gcc, clang)")


def _digest(compiler: list[str]) -> str:
    """Names a build: another source, compiler or processor must not find this one's."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    processor = platform.processor() or platform.machine()
    flags = Path("/proc/cpuinfo")
    if flags.exists():
        processor += next((line for line in flags.read_text().splitlines() if line.startswith("flags")), "")
    key = b"".join(file.read_bytes() for file in (*SOURCES, *HEADERS))
    key += repr((FLAGS, compiler, version, processor)).encode()
    return hashlib.sha256(key).hexdigest()[:20]


def _build(compiler: list[str], path: Path) -> None:
    command = [*compiler, *FLAGS, *map(str, SOURCES), "-o", str(path), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if done.returncode != 0:
        why = f"{compiler[0]} failed: {done.stderr.strip()[:2000]}"
        full = next((code for code in (errno.ENOSPC, errno.EDQUOT) if os.strerror(code) in done.stderr), None)
        raise KernelBuildError(why) if full is None else OSError(full, why)


def _open(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))
