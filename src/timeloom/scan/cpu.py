"""The linear recurrence in compiled code on a CPU: one pass over memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from timeloom.buffers import empty
from timeloom.kernels.cpu import build
from timeloom.scan import reference
from timeloom.scan.elements import Structure

_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}


class _ScanArgs(ctypes.Structure):
    """`scan_args` of cpu_scan.c, field by field."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("steps", "batch", "n", "reverse", "transpose")),
        ("dense", ctypes.c_long * 3),
        *((name, ctypes.c_void_p) for name in ("a", "b", "h0", "added", "h")),
    ]


def supports(b: Tensor) -> bool:
    return b.device.type == "cpu" and b.dtype in _SUFFIX and build.unavailable() is None


def scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor,
    structure: Structure,
    reverse: bool = False,
    transposed: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    """Same as `timeloom.scan.reference.scan`, over reversed time and with transposed elements too, without copies.

    `added`, of the shape of b, is for dense elements: `h[t] = a[t] (h[t-1] + added[t]) + b[t]`.
    """
    b, h0, added = b.contiguous(), h0.contiguous(), None if added is None else added.contiguous()
    if structure == "dense" and a.stride(-1) != 1 and a.stride(-2) == 1:
        a, transposed = a.transpose(-1, -2), not transposed
    if structure != "dense":
        a = a.contiguous()
    else:  # (T, B, n, n), a view where the batch is one dim or none
        a = a.flatten(1, -3) if a.dim() > 3 else a.unsqueeze(1)
        a = a if a.stride(-1) == 1 else a.contiguous()
    out = empty(*b.shape, like=b)
    if out.numel() == 0:
        return out
    n = b.shape[-1] if b.dim() > 1 else 1
    batch = h0.numel() // (2 * n if structure == "block" else n)
    strides = (a.stride(0), a.stride(1), a.stride(-2)) if structure == "dense" else (0, 0, 0)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in (a, b, h0, added, out))
    args = _ScanArgs(len(b), batch, n, reverse, transposed, (ctypes.c_long * 3)(*strides), *pointers)
    run = getattr(build.library(), f"timeloom_scan_{structure}_{_SUFFIX[b.dtype]}")
    run(ctypes.byref(args), torch.get_num_threads())
    return out


def serial(a: Tensor, b: Tensor, h0: Tensor, structure: Structure, reverse: bool = False) -> Tensor:
    """The recurrence step by step, in compiled code where there is some."""
    if supports(b):
        return scan(a, b, h0, structure, reverse)
    return (
        reference.scan(a.flip(0), b.flip(0), h0, structure).flip(0) if reverse else reference.scan(a, b, h0, structure)
    )
