"""Generated CUDA kernels on a CPU: the same text, compiled as C++, its threads as fibers (cuda_emulator/emulator.h)."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from timeloom.compile.cuda_layout import Direction
from timeloom.compile.emit_cuda import CudaSource
from timeloom.kernels.cuda.fused import FusedCUDASweeper
from timeloom.kernels.cuda.programs import headers

FOLDER = Path(__file__).parent / "cuda_emulator"
COMPILER = shutil.which("g++") or shutil.which("clang++")
ROOM = 227 << 10
ENTRY = """
extern "C" {{ alignas(16) float all_rows[{floats}]; }}
extern "C" const char *emulate(const FusedArgs *a, int blocks, int in_reverse) {{
  for (float &number : all_rows) number = NAN;
  return emulated::run(blocks, THREADS, in_reverse, [a] {{ fused_{direction}(*a); }});
}}
"""


@cache
def _folder() -> Path:
    """The kernels' headers, with what stands in for the device's own."""
    folder = Path(tempfile.mkdtemp(prefix="timeloom-emulated-"))
    for name, text in headers():
        (folder / name).write_text(text)
    for path in FOLDER.iterdir():
        shutil.copy(path, folder)
    return folder


@cache
def compiled(direction: Direction, text: str, shared: int) -> ctypes.CDLL:
    """The library of an emitted text."""
    assert COMPILER is not None
    whole = text + ENTRY.format(direction=direction, floats=shared // 4)
    path = _folder() / f"{hashlib.sha256(whole.encode()).hexdigest()[:16]}.so"
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-include", "emulator.h", f"-I{_folder()}"]
    done = subprocess.run([*command, "-x", "c++", "-", "-o", str(path)], input=whole, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
    library = ctypes.CDLL(str(path))
    library.emulate.restype = ctypes.c_char_p
    return library


class EmulatedSweeper(FusedCUDASweeper):
    """The CUDA sweeper over tensors of the CPU."""

    in_reverse = False
    room = ROOM
    at_once = 10**9
    """Rows up to which each is walked by a block of its own."""

    def _room(self) -> int:
        return self.room

    def _processors(self) -> int:
        return self.at_once

    def _launch(self, direction: Direction, source: CudaSource, blocks: int, args: Any) -> None:
        library = compiled(direction, source.text, source.shared)
        failure = library.emulate(ctypes.byref(args), blocks, self.in_reverse)
        assert failure is None, failure.decode()
