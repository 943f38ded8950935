"""The CUDA kernels for single rows on a CPU: the same source, run by the emulator."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from emulator import ONE_MEMORY, library

from timeloom.kernels.cuda.programs import SINGLE_RING, AdjointArgs, Variant, Wide, headers
from timeloom.kernels.cuda.sweeper import CUDASweeper

ENTRY = """
extern "C" const char *emulate(const {structure} *a, int blocks, int in_reverse) {{
  return emulated::run(blocks, THREADS, in_reverse, [a] {{ {name}(*a); }});
}}
"""


@cache
def compiled(variant: Variant) -> ctypes.CDLL:
    """The library of a variant that walks single rows, one block each."""
    assert variant.single
    assert variant.cluster == 1
    structure = "AdjointArgs" if variant.adjoint else "ForwardArgs"
    entry = ENTRY.format(structure=structure, name=variant.name)
    made = library(ONE_MEMORY + variant.source(SINGLE_RING) + entry, headers(variant.text.file))
    made.emulate.restype = ctypes.c_char_p
    return made


class EmulatedRows(CUDASweeper):
    """The CUDA sweeper on CPU tensors; `on_device` must be patched out."""

    in_reverse = False

    def _variant(self, adjoint: bool, rows: int, stores: int, decay: bool) -> Variant | Wide:
        return Variant(self._kernel, self._n, 0, adjoint, True, stores, decay, self._marks is not None, self.cell.masks)

    def _start(self, variant: Variant | Wide, steps: int, args: Any) -> None:
        assert isinstance(variant, Variant)
        assert isinstance(args, AdjointArgs) == variant.adjoint
        failure = compiled(variant).emulate(ctypes.byref(args), args.rows, self.in_reverse)
        assert failure is None, failure.decode()
