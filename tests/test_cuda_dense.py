"""Gradients at chunk ends by dense transfers: what the CUDA kernels do, by sweeps and chains in torch."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import Tensor

from timeloom.kernels import ReferenceSweeper
from timeloom.kernels.cuda import dense, nvrtc
from timeloom.kernels.reference import AdjointData
from timeloom.problem import Recurrence, cut_evenly, empty_states
from timeloom.solve.residual import certificate, floors, relative, scales


def chain(matrices: Tensor, offsets: Tensor, first: Tensor | None, batch: int) -> Tensor:
    """As the kernel's."""
    size = offsets.shape[1]
    maps, added = matrices.view(-1, batch, size, size), offsets.view(-1, batch, size)
    found = [torch.zeros_like(added[0]) if first is None else first]
    for link in range(len(added) - 1):
        found.append((found[-1].unsqueeze(1) @ maps[link]).squeeze(1) + added[link])
    return torch.cat(found)


class Sweeper(ReferenceSweeper):
    told_as = "stand-in"

    def measure(self, starts: Tensor, ends: Tensor, share: float, moves: Tensor | None, fading: bool) -> Tensor:
        assert moves is not None
        batch, size = self.problem.batch, self.cell.size
        shape = (-1, batch, size)
        starts, moves = starts.view(shape), moves.view(shape)
        arriving = torch.cat([starts[:1], ends.view(shape)[:-1]])
        floor = floors(None, self.problem.initial, (size,), share)
        return certificate(relative(moves, scales(starts, arriving, (size,), floor, fading), (size,)))


@pytest.fixture(autouse=True)
def _chain_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "chain", chain)


@pytest.mark.parametrize("name", list(zoo.KERNELS))
@pytest.mark.parametrize(("steps", "batch", "chunk"), [(40, 1, 10), (37, 3, 8), (9, 2, 8), (5, 1, 1)])
@pytest.mark.parametrize("last", [False, True])
def test_they_are_those_of_one_chunk(name: str, steps: int, batch: int, chunk: int, last: bool) -> None:
    net = zoo.network(name)
    x, initial = zoo.data(net, steps, batch)
    problem: Recurrence = net.recurrence(x, initial).detach()
    states = empty_states(steps, problem.initial, problem.cell.parts)
    sweeper = Sweeper(problem)
    whole = cut_evenly(steps, batch, steps, False)
    sweeper.forward(whole, problem.initial, states)
    generator = torch.Generator().manual_seed(1)
    incoming = torch.randn(steps, batch, problem.cell.parts[0], dtype=x.dtype, generator=generator)
    final = torch.randn(batch, problem.cell.size, dtype=x.dtype, generator=generator) if last else None

    def data() -> AdjointData:
        return AdjointData(states, incoming, x.new_zeros(steps, batch, problem.cell.gate_width))

    exact, ours = data(), data()
    ends = x.new_zeros(batch, problem.cell.size) if final is None else final
    begins, _ = sweeper.adjoint(cut_evenly(steps, batch, steps, True), ends, exact)
    found, error = dense.solve(sweeper, chunk, final, AdjointData(states, incoming), ours)  # type: ignore[arg-type]
    assert float(error) < 1e-12
    torch.testing.assert_close(found[-batch:], begins, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.gate_grads, exact.gate_grads, rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no NVRTC: {nvrtc.unavailable()}")
@pytest.mark.parametrize("size", [1, 33, 64, 128])
def test_chains_compile(size: int) -> None:
    text = (("dense_chain.cu", (dense.FOLDER / "dense_chain.cu").read_text()),)
    assert b"dense_chain" in nvrtc.compile_source(dense.source(size), "sm_90", text)
