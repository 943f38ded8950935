"""Memory: huge pages for large buffers on a CPU, if the system grants them, and limits on temporaries."""

from __future__ import annotations

import ctypes
import math
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

CACHED = 16 << 20
"""Size in bytes up to which temporaries stay in a CPU's cache; larger ones bring no speed-up."""
WORTH = 32 << 20
"""Size in bytes from which huge pages pay: the C library keeps smaller buffers mapped and reuses them, but maps larger
ones anew on every call, 4 KiB at a time.
"""
HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14


def empty(*shape: int, like: Tensor) -> Tensor:
    """`like.new_empty(shape)`; on Linux a large buffer requests huge pages, whose first touch is some 4× faster."""
    tensor = like.new_empty(shape)
    size = tensor.nbytes
    if size >= WORTH and tensor.device.type == "cpu" and _madvise() is not None:
        begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        whole = (tensor.data_ptr() + size - begin) // HUGE_PAGE * HUGE_PAGE
        _madvise()(ctypes.c_void_p(begin), ctypes.c_size_t(whole), MADV_HUGEPAGE)  # only advice: a refusal does no harm
    return tensor


def room(like: Tensor) -> int:
    """Bytes of temporaries allowed on this tensor's device: `CACHED` on a CPU, a quarter of a GPU's free memory."""
    if like.device.type != "cuda":
        return CACHED
    unused = torch.cuda.memory_reserved(like.device) - torch.cuda.memory_allocated(like.device)
    return (torch.cuda.mem_get_info(like.device)[0] + unused) // 4


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is infinite or NaN; also False if the sum of all values overflows."""
    return math.isfinite(float(tensor.detach().sum()))


@cache
def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
