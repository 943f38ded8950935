"""One residual: jumps, scales and the certificate as `timeloom.solve.residual` defines them, and who computes them."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported

import pytest
import torch
from emulated_chain import run_chain
from emulator import COMPILER
from torch import Tensor

from timeloom import cells
from timeloom.cells import Cell, GRUCell, LSTMCell, RNNCell
from timeloom.cells.fused import FusedCell
from timeloom.compile.fuse import Compiled, compile_step
from timeloom.kernels import CPUSweeper, FusedSweeper
from timeloom.kernels.cpu import build
from timeloom.kernels.cuda import chain
from timeloom.kernels.cuda.chain import ChainSweeper
from timeloom.kernels.cuda.programs import ChainArgs
from timeloom.kernels.reference import floor_of
from timeloom.problem import Recurrence
from timeloom.solve.residual import LAST, SHARE_OF_BOX, by_unit, certificate, floors, relative, scales

N, BATCH, LINKS = 5, 3, 7
SPOILED = {"finite": None, "nan": math.nan, "inf": math.inf}


def cell_of(kernel: str) -> Cell:
    gates = {"gru": 3, "lstm": 4}.get(kernel, 1)
    w_hh = torch.zeros(gates * N, N)
    if kernel == "gru":
        return GRUCell(w_hh, torch.zeros(N))
    return LSTMCell(w_hh) if kernel == "lstm" else RNNCell(w_hh, kernel.removeprefix("rnn_"))


def draw(cell: Cell, seed: int, links: int = LINKS) -> tuple[Tensor, Tensor]:
    """Starts and ends `(C, B, S)` whose sizes change along the chain, some of them all zero; small ones every other
    time.
    """
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(0, -6, links).view(-1, 1, 1) * (1.0 if seed % 2 else 1e-3)
    starts, noise = (torch.randn(links, BATCH, cell.size, generator=generator) * size for _ in range(2))
    ends = torch.cat([starts[1:], starts[:1]]) + 0.01 * noise
    starts[links // 2, 1], ends[links // 2 - 1, 1] = 0, 0
    return starts, ends


def by_hand(starts: Tensor, ends: Tensor, cell: Cell, floor: float, fading: bool, joint: bool = False) -> float:
    """The definition, number by number."""
    worst, boxed = 0.0, cell.bound(starts[0])
    for sequence in range(BATCH):
        so_far = [0.0] * len(cell.parts)
        for link in range(LINKS):
            start = starts[link, sequence].split(cell.parts)
            end = (starts[0] if link == 0 else ends[link - 1])[sequence].split(cell.parts)
            values = [max(float(a.abs().max()), float(b.abs().max())) for a, b in zip(start, end, strict=True)]
            so_far = [max(a, b) for a, b in zip(so_far, values, strict=True)] if fading else values
            first = min(link, max(LINKS - LAST, 0))  # of those that follow
            behind = torch.cat([starts[first:, sequence], ends[max(first - 1, 0) : -1, sequence]]).split(cell.parts, -1)
            for part, (a, b) in enumerate(zip(start, end, strict=True)):
                jump = float((b - a).abs().max())
                has_box = boxed is not None and math.isfinite(float(boxed.split(cell.parts, -1)[part][0, 0]))
                least = floor * min(1.0, float(behind[part].abs().max()))
                scale = max(max(so_far) if joint else so_far[part], least if has_box else 0.0)
                worst = max(worst, jump / scale if jump else 0.0)
    return worst


def by_definition(starts: Tensor, ends: Tensor, cell: Cell, floor: float, fading: bool, joint: bool = False) -> float:
    arriving = torch.cat([starts[:1], ends[:-1]])
    least = floors(cell.bound(starts[0]), starts[0], cell.parts, floor)
    scale = scales(starts, arriving, cell.parts, least, fading, joint=joint)
    return float(certificate(relative(arriving - starts, scale, cell.parts)))


WAYS = [(SHARE_OF_BOX, False), (0.0, True)]
"""Forward and backward: the share of the box that counts at least, and whether values fade."""
KERNELS = ("gru", "lstm", "rnn_tanh", "rnn_relu")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("floor", "fading"), WAYS)
def test_the_definition(kernel: str, floor: float, fading: bool) -> None:
    cell = cell_of(kernel)
    for seed in range(5):
        starts, ends = draw(cell, seed)
        for joint in (False, True):
            expected = by_hand(starts, ends, cell, floor, fading, joint)
            assert expected > 1e-3
            assert by_definition(starts, ends, cell, floor, fading, joint) == pytest.approx(expected, rel=1e-6)


def test_what_is_not_finite_is_infinite_and_no_jump_is_zero() -> None:
    assert float(certificate(torch.tensor([0.1, math.nan]))) == math.inf
    assert float(certificate(torch.tensor([math.inf, 0.1]))) == math.inf
    assert float(certificate(torch.zeros(0, 3))) == 0.0
    wide = by_unit(torch.tensor([[1.0, 2.0]]), (2, 3))
    assert wide.tolist() == [[1.0, 1.0, 2.0, 2.0, 2.0]]


@pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("floor", "fading"), WAYS)
@pytest.mark.parametrize("spoiled", SPOILED)
def test_the_cpus_kernel_computes_the_same(kernel: str, floor: float, fading: bool, spoiled: str) -> None:
    cell = cell_of(kernel)
    sweeper = CPUSweeper(Recurrence(cell, torch.zeros(1, BATCH, N), torch.zeros(BATCH, cell.size)))
    certify = sweeper.certifier(floor, fading)
    assert certify is not None
    for seed in range(5):
        starts, ends = draw(cell, seed)
        if SPOILED[spoiled] is not None:
            ends[4, 2, -1] = SPOILED[spoiled]
        expected = by_definition(starts, ends, cell, floor, fading)
        assert float(certify(starts.flatten(0, 1), ends.flatten(0, 1))) == pytest.approx(expected, rel=1e-6)
        assert math.isinf(expected) == (spoiled != "finite")


@pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))
@pytest.mark.parametrize(("floor", "fading"), WAYS)
@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_compiled_steps_jumps_are_the_same(floor: float, fading: bool, spoiled: str) -> None:
    step, parts = cells.SLSTM(2, N), tuple(torch.zeros(4, N) for _ in range(4))
    compiled = compile_step(step, parts, True, torch.randn(4, 2))
    problem = recurrence(compiled, step, torch.zeros(BATCH, 4 * N))
    certify = FusedSweeper(problem).certifier(floor, fading)
    assert certify is not None
    for seed in range(5):
        starts, ends = draw(problem.cell, seed)
        if SPOILED[spoiled] is not None:
            ends[4, 2, -1] = SPOILED[spoiled]
        expected = by_definition(starts, ends, problem.cell, floor, fading)
        assert float(certify(starts.flatten(0, 1), ends.flatten(0, 1))) == pytest.approx(expected, rel=1e-6)
        assert math.isinf(expected) == (spoiled != "finite")


@pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))
def test_other_states_of_compiled_steps_are_measured_in_torch() -> None:
    def step(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(state[0] + x), 0.5 * state[1] + x[:, :1]

    compiled = compile_step(step, (torch.zeros(4, N), torch.zeros(4, 1)), True, torch.randn(4, N))
    uneven = recurrence(compiled, step, torch.zeros(BATCH, N + 1), N)
    assert FusedSweeper(uneven).certifier(0.0, False) is None
    even = cells.SLSTM(2, N)
    compiled = compile_step(even, tuple(torch.zeros(4, N) for _ in range(4)), True, torch.randn(4, 2))
    ragged = replace(recurrence(compiled, even, torch.zeros(BATCH, 4 * N)), lengths=torch.ones(BATCH, dtype=torch.long))
    assert FusedSweeper(ragged).certifier(0.0, False) is None


def recurrence(compiled: Compiled, step: Any, initial: Tensor, width: int = 2) -> Recurrence:
    weights, u = compiled.prepare(step, torch.zeros(BATCH, width), initial)
    cell = FusedCell(compiled.fused, tuple(weight.detach() for weight in weights))
    return Recurrence(cell, u.detach().view(1, BATCH, -1), initial)


class ChainOnCPU(ChainSweeper):
    """The host's side of chain.cu, launching it on the CPU."""

    def least_scale(self, share_of_box: float) -> float:
        return floor_of(self.cell, share_of_box)

    def _run_chain(self, name: str, blocks: int, args: ChainArgs) -> None:
        run_chain(name, blocks, args)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("floor", "fading"), WAYS)
@pytest.mark.parametrize("links", [2, 3, LINKS, 33, 70])
def test_the_gpus_kernels_compute_the_same(
    kernel: str, floor: float, fading: bool, links: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one launch on GPUs with clusters, else in two."""
    cell = cell_of(kernel)
    sweeper = ChainOnCPU(Recurrence(cell, torch.zeros(1, BATCH, N), torch.zeros(BATCH, cell.size)))
    for seed in range(4):
        starts, ends = draw(cell, seed, links)
        expected = by_definition(starts, ends, cell, floor, fading, joint=fading)
        assert expected > 1e-3
        for clusters in (True, False):
            monkeypatch.setattr(chain, "has_clusters", lambda device, clusters=clusters: clusters)
            found = sweeper.measure(starts.flatten(0, 1), ends.flatten(0, 1), floor, None, fading)
            assert float(found) == pytest.approx(expected, rel=1e-6)
            assert sweeper.met == found, "no limit"
