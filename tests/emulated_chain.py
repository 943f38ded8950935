"""The kernels of chain.cu on a CPU: the same source, run by the emulator."""

from __future__ import annotations

import ctypes
from functools import cache

from emulator import ONE_MEMORY, library

from timeloom.kernels.cuda.programs import CHAIN_THREADS, FOLDER, ChainArgs

ENTRY = """
extern "C" const char *emulate_{name}(const ChainArgs *a, int blocks, int in_reverse) {{
  return emulated::run(blocks, {threads}, in_reverse, [a] {{ {name}(*a); }});
}}
"""


@cache
def _library() -> ctypes.CDLL:
    """Functions `emulate_NAME(args, blocks, in_reverse)`."""
    entries = [ENTRY.format(name=name, threads=threads) for name, threads in CHAIN_THREADS.items()]
    return library(ONE_MEMORY + (FOLDER / "chain.cu").read_text() + "".join(entries))


def run_chain(name: str, blocks: int, args: ChainArgs, in_reverse: bool = False) -> None:
    """Launch a kernel of chain.cu; `in_reverse`: the last thread of a block first."""
    emulate = getattr(_library(), f"emulate_{name}")
    emulate.restype = ctypes.c_char_p
    failure = emulate(ctypes.byref(args), blocks, in_reverse)
    assert failure is None, failure.decode()
