"""Texts of torch's cells for the CUDA skeletons, run on a CPU in float64, against torch's own derivatives."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from timeloom.compile.builtin import EQUATIONS
from timeloom.compile.emit_cell import emit
from timeloom.kernels.cuda.programs import GENERATED
from timeloom.kernels.cuda.texts import TEXTS, write

COMPILER = shutil.which("g++") or shutil.which("clang++")
ROWS = 64
ELEMENTS = """
#pragma once
#include <cmath>
#define INLINE static inline
typedef double V;
INLINE V v_const(V x) { return x; }
INLINE V v_where(bool holds) { return holds; }
INLINE V v_select(V condition, V yes, V no) { return condition != 0 ? yes : no; }
INLINE V v_fma(V a, V b, V c) { return std::fma(a, b, c); }
INLINE V v_sigmoid(V x) { return 1 / (1 + std::exp(-x)); }
INLINE V v_tanh(V x) { return std::tanh(x); }
"""
ENTRY = """
#include "cell.cuh"
extern "C" void run_advance(int rows, const V *y, const V *u, const V *vectors, const V *state,
                            V *next, V *saved, V *keep) {
  for (int i = 0; i < rows; i++)
    advance(y + i * PRODUCTS, u + i * INPUTS, vectors + i, state + i * PARTS, next + i * PARTS, saved + i * SAVED,
            keep + i * PARTS);
}
extern "C" void run_pull(int rows, const V *saved, const V *before, const V *after, const V *vectors, const V *g,
                         V *d_products, V *grads, V *through, V *keep) {
  for (int i = 0; i < rows; i++)
    pull(saved + i * SAVED, before + i * PARTS, after + i * PARTS, vectors + i, g + i * PARTS,
         d_products + i * PRODUCTS, grads + i * GRADS, through + i * PARTS, keep + i * PARTS);
}
"""

Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From the products `(rows, gates)`, the inputs `(rows, gates)`, the per-unit numbers `(rows,)` and the state
`(rows, parts)` to the next state."""


def gru(y: Tensor, u: Tensor, own: Tensor, state: Tensor) -> Tensor:
    reset, update = torch.sigmoid(y[:, 0] + u[:, 0]), torch.sigmoid(y[:, 1] + u[:, 1])
    candidate = torch.tanh(u[:, 2] + reset * (y[:, 2] + own))
    return torch.stack([(1 - update) * candidate + update * state[:, 0]], 1)


def lstm(y: Tensor, u: Tensor, own: Tensor, state: Tensor) -> Tensor:
    i, f, o = (torch.sigmoid(y[:, k] + u[:, k]) for k in (0, 1, 3))
    c = f * state[:, 1] + i * torch.tanh(y[:, 2] + u[:, 2])
    return torch.stack([o * torch.tanh(c), c], 1)


STEPS: dict[str, Step] = {
    "gru": gru,
    "lstm": lstm,
    "rnn_tanh": lambda y, u, own, state: torch.tanh(y + u),
    "rnn_relu": lambda y, u, own, state: torch.relu(y + u),
}
GATES = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}


def library(kind: str, zoned: bool, folder: Path) -> tuple[ctypes.CDLL, dict[str, int]]:
    """The text of a cell, compiled, and what it defines."""
    text = emit(kind, zoned)
    (folder / "cell.cuh").write_text(text)
    (folder / "elements.cuh").write_text(ELEMENTS)
    (folder / "entry.cpp").write_text(ENTRY)
    command = [str(COMPILER), "-std=c++17", "-O1", "-shared", "-fPIC", "entry.cpp", "-o", "cell.so"]
    subprocess.run(command, cwd=folder, check=True)
    counts = {name: int(number) for name, number in re.findall(r"^#define (\w+) (\d+)$", text, re.MULTILINE)}
    return ctypes.CDLL(str(folder / "cell.so")), counts


def run(function: Callable[..., None], given: list[Tensor], widths: list[int]) -> list[Tensor]:
    found = [torch.full((ROWS, width), torch.nan, dtype=torch.float64) for width in widths]
    function(ROWS, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (*given, *found)))
    return found


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("zoned", [False, True], ids=["plain", "zoned"])
@pytest.mark.parametrize("kind", EQUATIONS)
def test_a_step_and_its_pull_are_torch_s(kind: str, zoned: bool, tmp_path: Path) -> None:
    """Next state, gradients of products, of inputs and of the state past the products, and what a unit keeps."""
    torch.manual_seed(0)
    built, counts = library(kind, zoned, tmp_path)
    gates, parts = GATES[kind], counts["PARTS"]
    y, u, state, g = (torch.randn(ROWS, width, dtype=torch.float64) for width in (gates, gates, parts, parts))
    own, shares = torch.randn(ROWS, dtype=torch.float64), torch.rand(ROWS, parts * zoned, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (y, u, own, state)]
    follows = STEPS[kind](y, u, own, state)
    kept = shares if zoned else torch.zeros_like(state)
    expected = follows + kept * (state - follows)
    found = torch.autograd.grad(expected, leaves, g, retain_graph=True, allow_unused=True, materialize_grads=True)
    by_product, by_input, by_own, through = found
    last = torch.zeros_like(g)
    last[:, -1] = 1.0
    if kind.startswith("rnn"):  # no gate carries a unit: the diagonal of the Jacobian, of which `own` is W_hh's part
        slope = own * torch.autograd.grad(follows, y, torch.ones_like(follows), retain_graph=True)[0][:, 0]
        keep = (kept[:, 0] + (1 - kept[:, 0]) * slope)[:, None]
    else:
        keep = torch.autograd.grad(expected, state, last)[0] * last
    given = [tensor.detach().contiguous() for tensor in (y, torch.cat([u, shares], 1), own, state)]
    advanced = run(built.run_advance, given, [parts, counts["SAVED"], parts])
    torch.testing.assert_close([advanced[0], advanced[2]], [expected.detach(), keep.detach()], rtol=0, atol=1e-14)

    def shown(values: Tensor, which: int) -> Tensor:  # the skeletons bring what is asked for, and nothing else
        asked = torch.tensor([bool(which >> part & 1) for part in range(parts)])
        return values.detach().masked_fill(~asked, torch.nan)

    before, after = shown(state, counts["BEFORE"]), shown(expected, counts["AFTER"])
    widths = [gates, counts["GRADS"], parts, parts]
    pulled = run(built.run_pull, [advanced[1], before, after, own.detach(), g], widths)
    grads = torch.cat([by_input, by_own[:, None]], 1)[:, : counts["GRADS"]]
    torch.testing.assert_close(pulled, [by_product, grads, through, keep.detach()], rtol=0, atol=1e-14)


def test_generated_files_are_those_that_would_be_written_now() -> None:
    """NVRTC compiles them. `make kernels` writes them anew."""
    assert sorted(path.name for path in GENERATED.iterdir()) == sorted(TEXTS)
    for file, which in TEXTS.items():
        assert (GENERATED / file).read_text() == emit(*which), f"{file} is out of date"


def test_files_are_written(tmp_path: Path) -> None:
    write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TEXTS)
    assert "#define ZONED 1\n" in (tmp_path / "zoned_lstm.cuh").read_text()
