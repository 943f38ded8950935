"""The Newton kernels' own source on a CPU: compiled as C++ with warp.h in place of CUDA, driven by the host code."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from timeloom.kernels.cuda.newton import ADJOINT, BOTH, FORWARD, CUDANewton, NewtonArgs, NewtonVariant
from timeloom.kernels.cuda.programs import headers, text_of

COMPILER = shutil.which("g++") or shutil.which("clang++")
SHIM = Path(__file__).with_name("warp.h")


@cache
def library(variant: NewtonVariant, adjoint: bool) -> ctypes.CDLL:
    """Functions `run_NAME(blocks, args)`."""
    assert COMPILER is not None
    names = (*(ADJOINT if adjoint else FORWARD), *BOTH)
    runs = [
        f'extern "C" void run_{name}(int blocks, const NewtonArgs *args) '
        f"{{ Launch<NewtonArgs>::run({name}, blocks, args); }}"
        for name in names
    ]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, text in headers(text_of(variant.kernel).file):
            (place / name).write_text(text)
        (place / "functions.cuh").write_text(f'#pragma once\n#include "{SHIM}"\n')
        (place / "kernels.cpp").write_text("\n".join([variant.source(adjoint), *runs, ""]))
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
        subprocess.run([COMPILER, *flags, "kernels.cpp", "-o", "kernels.so"], cwd=place, check=True)
        return ctypes.CDLL(str(place / "kernels.so"))


class WarpNewton(CUDANewton):
    """The host side of the kernels, which launches them on the CPU."""

    def _launch(self, name: str, blocks: int, args: NewtonArgs) -> None:
        getattr(library(self._variant, name in ADJOINT), f"run_{name}")(blocks, ctypes.byref(args))
