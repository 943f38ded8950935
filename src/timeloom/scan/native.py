"""The linear recurrence in compiled code on a CPU: one pass over memory."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from timeloom.memory import empty
from timeloom.scan import reference
from timeloom.scan.elements import Structure, transpose
from timeloom.sweep import native

SOURCE = Path(__file__).with_name("cpu_scan.c")
_REAL = {torch.float32: ("REAL=float",), torch.float64: ("REAL=double",)}


class _ScanArgs(ctypes.Structure):
    """`scan_args` of cpu_scan.c, field by field."""

    _fields_ = [(name, ctypes.c_long) for name in ("steps", "batch", "n", "reverse", "transpose")] + [
        (name, ctypes.c_void_p) for name in ("a", "b", "h0", "h")
    ]


def supports(b: Tensor) -> bool:
    return b.device.type == "cpu" and b.dtype in _REAL and native.unavailable(SOURCE, _REAL[b.dtype]) is None


def scan(
    a: Tensor, b: Tensor, h0: Tensor, structure: Structure, reverse: bool = False, transposed: bool = False
) -> Tensor:
    """Same as `timeloom.scan.reference.scan`, over reversed time and with transposed elements too, without copies."""
    a, b, h0 = a.contiguous(), b.contiguous(), h0.contiguous()
    out = empty(*b.shape, like=b)
    if out.numel() == 0:
        return out
    n = b.shape[-1] if b.dim() > 1 else 1
    batch = h0.numel() // (2 * n if structure == "block" else n)
    args = _ScanArgs(len(b), batch, n, reverse, transposed, *(t.data_ptr() for t in (a, b, h0, out)))
    run = getattr(native.library(SOURCE, _REAL[b.dtype]), f"timeloom_scan_{structure}")
    run(ctypes.byref(args), torch.get_num_threads())
    return out


def serial(a: Tensor, b: Tensor, h0: Tensor, structure: Structure) -> Tensor:
    """The recurrence step by step, in compiled code where there is some."""
    if not supports(b):
        return reference.scan(a, b, h0, structure)
    flipped = transpose(a, structure)
    if not a.is_contiguous() and flipped.is_contiguous():
        return scan(flipped, b, h0, structure, transposed=True)
    return scan(a, b, h0, structure)
