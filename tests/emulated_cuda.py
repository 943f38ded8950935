"""Generated CUDA kernels on a CPU: the same source, run by the emulator."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from emulator import library

from timeloom.compile.cuda_layout import Direction
from timeloom.compile.emit_cuda import CudaSource
from timeloom.kernels.cuda.fused import FusedCUDASweeper
from timeloom.kernels.cuda.programs import headers

ROOM = 227 << 10
ENTRY = """
extern "C" {{ alignas(16) float all_rows[{floats}]; }}
extern "C" const char *emulate(const FusedArgs *a, int blocks, int in_reverse) {{
  for (float &number : all_rows) number = NAN;
  return emulated::run(blocks, THREADS, in_reverse, [a] {{ fused_{direction}(*a); }});
}}
"""


@cache
def compiled(direction: Direction, text: str, shared: int) -> ctypes.CDLL:
    """The library of an emitted text."""
    made = library(text + ENTRY.format(direction=direction, floats=shared // 4), headers())
    made.emulate.restype = ctypes.c_char_p
    return made


class EmulatedSweeper(FusedCUDASweeper):
    """The CUDA sweeper on CPU tensors."""

    in_reverse = False
    room = ROOM
    at_once = 10**9
    """Rows up to which each is walked by its own block."""

    def _room(self) -> int:
        return self.room

    def _processors(self) -> int:
        return self.at_once

    def _launch(self, direction: Direction, source: CudaSource, blocks: int, args: Any) -> None:
        failure = compiled(direction, source.text, source.shared).emulate(ctypes.byref(args), blocks, self.in_reverse)
        assert failure is None, failure.decode()
