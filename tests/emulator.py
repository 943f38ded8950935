"""CUDA sources compiled as C++ for a CPU, with threads as fibers (cuda_emulator/emulator.h)."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "cuda_emulator"
COMPILER = shutil.which("g++") or shutil.which("clang++")
OPTIONS = ("-std=c++17", "-O0", "-w", "-fPIC")
ONE_MEMORY = "#undef __shared__\n#define __shared__ static\n"
"""A prefix for kernels that declare shared memory, which all fibers then share."""


def _folder_until_exit() -> Path:
    folder = tempfile.mkdtemp(prefix="timeloom-emulated-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def _emulator() -> Path:
    """A folder with the emulator's headers, of which emulator.h is precompiled once for all sources."""
    assert COMPILER is not None
    folder = _folder_until_exit()
    for path in FOLDER.iterdir():
        shutil.copy(path, folder)
    header = folder / "emulator.h"
    subprocess.run([COMPILER, *OPTIONS, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    return folder


@cache
def _headers_at(headers: tuple[tuple[str, str], ...]) -> Path:
    """A folder with the kernels' headers, except those that the emulator replaces."""
    folder = _folder_until_exit()
    for name, text in headers:
        if not (FOLDER / name).exists():
            (folder / name).write_text(text)
    return folder


def library(text: str, headers: Iterable[tuple[str, str]] = ()) -> ctypes.CDLL:
    """The library of a source and its headers, with functions `emulate…`."""
    folders = _emulator(), _headers_at(tuple(headers))
    path = folders[1] / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    include = ["-include", str(folders[0] / "emulator.h"), *(f"-I{folder}" for folder in folders)]
    command = [str(COMPILER), *OPTIONS, "-shared", *include, "-x", "c++", "-", "-o", str(path)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(path))
