"""Whether structures lie in a kernel's text as the host says: assertions for NVRTC to check."""

from __future__ import annotations

import ctypes
from functools import cache

from timeloom.kernels.cuda import nvrtc


def same_layout(name: str, structure: type[ctypes.Structure], *fields: str) -> str:
    """Assertions that a structure has the host's size, and these fields their places if NVRTC knows them."""
    text = f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});\n"
    for field in fields if _knows_offsets() else ():
        text += f"static_assert(__builtin_offsetof({name}, {field}) == {getattr(structure, field).offset});\n"
    return text


@cache
def _knows_offsets() -> bool:
    """NVRTC 13.0 does not, later ones do."""
    try:
        nvrtc.compile_source("struct Pair { int a, b; };\nstatic_assert(__builtin_offsetof(Pair, b) == 4);\n", "sm_80")
    except nvrtc.CompileError:
        return False
    return True
