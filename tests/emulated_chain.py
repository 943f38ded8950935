"""The kernels of chain.cu on a CPU: their own text as C++, its threads as fibers (cuda_emulator/emulator.h)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from emulated_rows import COMPILER
from emulated_rows import FOLDER as EMULATOR

from timeloom.kernels.cuda.programs import CHAIN_THREADS, FOLDER, ChainArgs

ENTRY = """
extern "C" const char *emulate_{name}(const ChainArgs *a, int blocks, int in_reverse) {{
  return emulated::run(blocks, {threads}, in_reverse, [a] {{ {name}(*a); }});
}}
"""


@cache
def _library() -> ctypes.CDLL:
    """Functions `emulate_NAME(args, blocks, in_reverse)`."""
    assert COMPILER is not None
    folder = Path(mkdtemp(prefix="timeloom-emulated-"))
    shutil.copy(EMULATOR / "emulator.h", folder)
    shared = "#undef __shared__\n#define __shared__ static\n"  # one memory for all fibers
    entries = [ENTRY.format(name=name, threads=threads) for name, threads in CHAIN_THREADS.items()]
    text = shared + (FOLDER / "chain.cu").read_text() + "".join(entries)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-include", "emulator.h", f"-I{folder}"]
    done = subprocess.run([*command, "-x", "c++", "-", "-o", str(folder / "chain.so")], input=text, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "chain.so"))


def run_chain(name: str, blocks: int, args: ChainArgs, in_reverse: bool = False) -> None:
    """Launch a kernel of chain.cu; `in_reverse`: the last thread of a block first."""
    emulate = getattr(_library(), f"emulate_{name}")
    emulate.restype = ctypes.c_char_p
    failure = emulate(ctypes.byref(args), blocks, in_reverse)
    assert failure is None, failure.decode()
