"""The kernel that compares the jumps of a chain, emulated on a CPU, against plain torch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from emulated_rows import COMPILER
from emulated_rows import FOLDER as EMULATOR
from torch import Tensor

from timeloom.kernels.cuda.programs import CHAIN_THREADS, FOLDER, ChainArgs
from timeloom.solve.residual import following

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@cache
def library() -> ctypes.CDLL:
    assert COMPILER is not None
    folder = Path(mkdtemp(prefix="timeloom-emulated-"))
    shutil.copy(EMULATOR / "emulator.h", folder)
    shared = "#undef __shared__\n#define __shared__ static\n"  # one memory for all fibers
    threads = CHAIN_THREADS["compare"]
    entry = f"""
        extern "C" const char *emulate(const ChainArgs *a, int in_reverse) {{
          return emulated::run(1, {threads}, in_reverse, [a] {{ compare(*a); }});
        }}
    """
    text = shared + (FOLDER / "chain.cu").read_text() + entry
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-include", "emulator.h", f"-I{folder}"]
    done = subprocess.run([*command, "-x", "c++", "-", "-o", str(folder / "chain.so")], input=text, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
    found = ctypes.CDLL(str(folder / "chain.so"))
    found.emulate.restype = ctypes.c_char_p
    return found


def compared(measured: Tensor, parts: int, floor: float, fading: bool, in_reverse: bool) -> float:
    links, groups, _ = measured.shape
    worst = torch.full((), torch.nan)
    args = ChainArgs(links=links, batch=groups // parts, parts=parts, n=1, fading=fading)
    args.measured, args.worst, args.floor[0] = measured.data_ptr(), worst.data_ptr(), floor
    failure = library().emulate(ctypes.byref(args), in_reverse)
    assert failure is None, failure.decode()
    return float(worst)


@pytest.mark.parametrize("fading", [False, True], ids=["states", "gradients"])
@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (5, 2), (20, 2)])
@pytest.mark.parametrize("links", [1, 33, 1024])
def test_the_largest_jump_beside_its_scale(links: int, batch: int, parts: int, fading: bool) -> None:
    """Values and jumps that grow or fade by a factor of thousands along a chain, a few of which stand out."""
    torch.manual_seed(links)
    slope = torch.linspace(-4, 4, links).exp().view(-1, 1)
    values = torch.rand(links, batch * parts) * (slope if fading else slope.flip(0)) + 1e-3
    jumps = 1e-5 * torch.rand(links, batch * parts) * values
    jumps[torch.randint(links, (2,)), torch.randint(batch * parts, (2,))] *= 10
    measured = torch.stack([values, jumps], -1).contiguous()
    floor = torch.tensor([0.0 if part else 0.25 for part in range(parts)]).repeat(batch)
    if fading:
        scale, share = values.cummax(0).values, 0.0
    else:
        share = 0.25
        scale = torch.maximum(values, floor * following(values).clamp(max=1))
    expected = float((jumps / scale).max())
    for in_reverse in (False, True):
        assert compared(measured, parts, share, fading, in_reverse) == pytest.approx(expected, rel=1e-6)
