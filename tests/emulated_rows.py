"""The CUDA kernels for single rows on a CPU: their own text, compiled as C++, threads as fibers (see emulated_cuda)."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from timeloom.kernels.cuda.programs import SINGLE_RING, AdjointArgs, Variant, Wide, headers
from timeloom.kernels.cuda.sweeper import CUDASweeper

FOLDER = Path(__file__).parent / "cuda_emulator"
COMPILER = shutil.which("g++") or shutil.which("clang++")
ENTRY = """
extern "C" const char *emulate(const {structure} *a, int blocks, int in_reverse) {{
  return emulated::run(blocks, THREADS, in_reverse, [a] {{ {name}(*a); }});
}}
"""


@cache
def compiled(variant: Variant) -> ctypes.CDLL:
    """The library of a variant that walks single rows, one block each."""
    assert COMPILER is not None
    assert variant.single
    assert variant.cluster == 1
    folder = Path(tempfile.mkdtemp(prefix="timeloom-emulated-"))
    for name, text in headers(variant.text.file):
        (folder / name).write_text(text)
    for path in FOLDER.iterdir():
        shutil.copy(path, folder)
    structure = "AdjointArgs" if variant.adjoint else "ForwardArgs"
    shared = "#undef __shared__\n#define __shared__ static\n"  # one memory for all fibers
    whole = shared + variant.source(SINGLE_RING) + ENTRY.format(structure=structure, name=variant.name)
    path = folder / f"{hashlib.sha256(whole.encode()).hexdigest()[:16]}.so"
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-include", "emulator.h", f"-I{folder}"]
    done = subprocess.run([*command, "-x", "c++", "-", "-o", str(path)], input=whole, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
    library = ctypes.CDLL(str(path))
    library.emulate.restype = ctypes.c_char_p
    return library


class EmulatedRows(CUDASweeper):
    """The CUDA sweeper over tensors of the CPU; `on_device` must stand aside."""

    in_reverse = False

    def _variant(self, adjoint: bool, rows: int, stores: int, decay: bool) -> Variant | Wide:
        return Variant(self._kernel, self._n, 0, adjoint, True, stores, decay, self._marks is not None, self.cell.masks)

    def _start(self, variant: Variant | Wide, steps: int, args: Any) -> None:
        assert isinstance(variant, Variant)
        assert isinstance(args, AdjointArgs) == variant.adjoint
        failure = compiled(variant).emulate(ctypes.byref(args), args.rows, self.in_reverse)
        assert failure is None, failure.decode()
