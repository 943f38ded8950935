"""A whole layer as the CUDA kernels run it, by reference sweeps in their place: sweeps, corrections, gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from timeloom.cells import GRUCell, LSTMCell, RNNCell
from timeloom.kernels import AdjointData, ReferenceSweeper
from timeloom.kernels.cuda import dense
from timeloom.kernels.cuda import layer as cuda_layer
from timeloom.kernels.cuda.layer import CUDALayer
from timeloom.kernels.layer import Cutting
from timeloom.problem import Recurrence, Segments
from timeloom.solve.residual import certificate, floors, relative, scales

STEPS, BATCH, INPUTS, UNITS = 60, 3, 4, 5
CELLS: dict[str, Any] = {
    "GRU": GRUCell.of,
    "LSTM": lambda w_ih, w_hh, *_: LSTMCell(w_hh),
    "RNN": lambda w_ih, w_hh, *_: RNNCell(w_hh, "tanh"),
}
CUTTINGS = {
    "one chunk": Cutting(STEPS, 0),
    "a long warm-up": Cutting(7, 53),
    "corrected sweeps": Cutting(8, 0, 8),
    "corrected behind a warm-up": Cutting(16, 4, 4),
    "dense transfers": Cutting(9, 0, 2, dense=True),
}


class StandIn(ReferenceSweeper):
    """The CUDA sweeper's methods. A backward pass is given no inputs, since kernels read the gates; these are kept."""

    inputs: ClassVar[Tensor]
    told_as = "stand-in"

    def __init__(self, problem: Recurrence, saved: Tensor | None = None, mask: Tensor | None = None) -> None:
        if problem.u.shape[-1]:
            StandIn.inputs = problem.u
        super().__init__(Recurrence(problem.cell, StandIn.inputs, problem.initial))

    @staticmethod
    def room_for_saved(problem: Recurrence) -> Tensor | None:
        return problem.initial.new_zeros(problem.steps, problem.batch, 1)

    def adjoint_entering(
        self, segments: Segments, lead: int, final: Tensor | None, data: AdjointData, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        final = torch.zeros_like(self.problem.initial) if final is None else final
        return super().adjoint_entering(segments, lead, final, data, want_decay)

    def correct(self, starts: Tensor, ends: Tensor, decay: Tensor, boxed: bool) -> Tensor:
        return starts + self._moves(starts, ends, decay)

    def _moves(self, starts: Tensor, ends: Tensor, decay: Tensor) -> Tensor:
        batch, moves = self.problem.batch, torch.zeros_like(starts)
        for at in range(batch, len(starts), batch):
            here, before = slice(at, at + batch), slice(at - batch, at)
            moves[here] = decay[before] * moves[before] + ends[before] - starts[here]
        return moves

    def certify(
        self, starts: Tensor, ends: Tensor, share: float, decay: Tensor | None = None, fading: bool = False
    ) -> Tensor:
        moves = self._moves(starts, ends, torch.zeros_like(starts) if decay is None else decay)
        return self.measure(starts, ends, share, moves, fading)

    def measure(self, starts: Tensor, ends: Tensor, share: float, moves: Tensor | None, fading: bool) -> Tensor:
        assert moves is not None
        size, shape = self.cell.size, (-1, self.problem.batch, self.cell.size)
        starts, moves = starts.view(shape), moves.view(shape)
        arriving = torch.cat([starts[:1], ends.view(shape)[:-1]])
        floor = floors(None, self.problem.initial, (size,), share)
        return certificate(relative(moves, scales(starts, arriving, (size,), floor, fading), (size,)))


def chain(matrices: Tensor, offsets: Tensor, first: Tensor | None, batch: int) -> Tensor:
    size = offsets.shape[1]
    found = [torch.zeros_like(offsets[:batch]) if first is None else first]
    for link, added in enumerate(offsets.split(batch)[:-1]):
        maps = matrices.view(-1, batch, size, size)[link]
        found.append((found[-1].unsqueeze(1) @ maps).squeeze(1) + added)
    return torch.cat(found)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_layer, "CUDASweeper", StandIn)
    monkeypatch.setattr(dense, "chain", chain)


@pytest.mark.parametrize("last", [False, True], ids=["outputs", "outputs and final state"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", CUTTINGS)
@pytest.mark.parametrize("kind", CELLS)
def test_states_and_gradients_are_torchs(kind: str, name: str, bias: bool, last: bool) -> None:
    torch.manual_seed(0)
    cutting = CUTTINGS[name]
    truth = getattr(nn, kind)(INPUTS, UNITS, bias=bias).double()
    x = torch.randn(STEPS, BATCH, INPUTS, dtype=torch.float64, requires_grad=True)
    parts = 2 if kind == "LSTM" else 1
    hidden = [torch.randn(1, BATCH, UNITS, dtype=torch.float64, requires_grad=True) for _ in range(parts)]
    y, final = truth(x, tuple(hidden) if parts > 1 else hidden[0])
    pulls = [torch.randn_like(y)] + ([torch.randn_like(hidden[0]) for _ in range(parts)] if last else [])
    torch.autograd.backward([y, *(final if parts > 1 else (final,))][: len(pulls)], pulls)

    weights: list[Any] = [weight.detach().float() for weight in truth.parameters()]
    weights += [None] * (4 - len(weights))
    given = x.detach().float()
    cell = CELLS[kind](*weights)
    initial = torch.cat([part.detach().float()[0] for part in hidden], -1)
    layer = CUDALayer(cell, given, initial, *weights)
    forward = Cutting(cutting.chunk, cutting.warmup, 8 if cutting.dense else cutting.sweeps)
    kept, error = layer.forward(forward, 0.1, keep=True)
    assert float(error) < 1e-5
    torch.testing.assert_close(kept[0][1:], y.detach().float(), rtol=0, atol=2e-5)
    at_end = torch.cat([pull[0] for pull in pulls[1:]], -1).float() if last else None
    found, error = layer.backward(cutting, kept, (pulls[0].float(), at_end), want_x=True)
    assert float(error) < 1e-5
    expected = [x.grad, torch.cat([part.grad[0] for part in hidden if part.grad is not None], -1)]
    expected += [weight.grad for weight in truth.parameters()]
    for ours, exact in zip([grad for grad in found if grad is not None], expected, strict=True):
        assert exact is not None
        assert float((ours.double() - exact).norm() / exact.norm()) < 2e-5
    assert len({grad.data_ptr() for grad in found if grad is not None}) == len(expected), "each its own memory"


def test_gradients_of_x_are_made_where_they_are_wanted() -> None:
    weights: list[Any] = [weight.detach() for weight in nn.GRU(INPUTS, UNITS).parameters()]
    layer = CUDALayer(GRUCell.of(*weights), torch.randn(STEPS, BATCH, INPUTS), torch.zeros(BATCH, UNITS), *weights)
    kept, _ = layer.forward(Cutting(STEPS, 0), 0.1, keep=True)
    found, _ = layer.backward(Cutting(STEPS, 0), kept, (torch.randn(STEPS, BATCH, UNITS), None), want_x=False)
    assert found[0] is None
