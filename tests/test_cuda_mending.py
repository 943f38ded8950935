"""CUDA kernels behind a certificate, emulated on a CPU: they sweep if it is missed, and write nothing if it is met."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from emulated_rows import EmulatedRows
from emulator import COMPILER
from test_masked_kernels import masked_problem, single
from torch import Tensor

from timeloom.cells.base import NO_MASKS
from timeloom.kernels.cuda import sweeper as cuda_sweeper
from timeloom.kernels.mending import Unless
from timeloom.kernels.reference import AdjointData
from timeloom.problem import Recurrence, Segments, cut_evenly, empty_states

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

CHUNK, LEAD, LIMIT = 6, 9, 1e-6
MET, MISSED = 0.5 * LIMIT, [2 * LIMIT, torch.inf, torch.nan]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_sweeper, "on_device", lambda _: nullcontext())


def unread(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def unless(certificate: float, rows: int) -> Unless:
    return Unless(torch.tensor(certificate), LIMIT, rows)


class Case:
    """A sweeper, and room for what it writes: all of it NaN."""

    def __init__(self, kind: str, reverse: bool) -> None:
        self.problem: Recurrence = single(masked_problem(kind, 5, NO_MASKS, torch.float64))
        self.sweeper = EmulatedRows(self.problem, EmulatedRows.room_for_saved(self.problem))
        self.segments: Segments = cut_evenly(self.problem.steps, self.problem.batch, CHUNK, reverse)
        self.states = self.room()
        self.starts = unread(len(self.segments), self.problem.cell.size)

    def room(self) -> list[Tensor]:
        like = self.problem.initial
        return [part.fill_(torch.nan) for part in empty_states(self.problem.steps, like, self.problem.cell.parts)]

    def gradients(self) -> AdjointData:
        """Room for those of gates, over the states of a forward pass in one chunk."""
        whole = self.room()
        for part, first in zip(whole, self.problem.initial.split(self.problem.cell.parts, -1), strict=True):
            part[0] = first
        steps, batch = self.problem.steps, self.problem.batch
        self.sweeper.forward(cut_evenly(steps, batch, steps, False), self.problem.initial, whole)
        torch.manual_seed(5)
        incoming = torch.randn(steps, batch, self.problem.cell.parts[0])
        return AdjointData(whole, incoming, unread(steps, batch, self.problem.cell.gate_width))


@pytest.mark.parametrize("certificate", MISSED)
@pytest.mark.parametrize("kind", ["gru", "lstm", "tanh"])
def test_a_longer_warm_up_where_a_certificate_is_missed(kind: str, certificate: float) -> None:
    """It finds what the same warm-up finds by itself, in the places of what was not certified."""
    case, alone = Case(kind, reverse=False), Case(kind, reverse=False)
    starts, ends, _ = alone.sweeper.forward_entering(alone.segments, LEAD, alone.states, want_decay=False)
    given = unless(certificate, len(case.segments))
    entered = case.sweeper.retry(given, case.segments, LEAD, case.starts, case.states, want_decay=False)
    torch.testing.assert_close([case.starts, entered], [starts, ends], rtol=0, atol=0)
    torch.testing.assert_close([part[1:] for part in case.states], [part[1:] for part in alone.states], rtol=0, atol=0)


@pytest.mark.parametrize("certificate", MISSED)
@pytest.mark.parametrize("kind", ["gru", "lstm", "tanh"])
def test_gradients_by_a_longer_warm_up(kind: str, certificate: float) -> None:
    case, alone = Case(kind, reverse=True), Case(kind, reverse=True)
    data, other = case.gradients(), alone.gradients()
    final = torch.randn_like(case.problem.initial)
    ends, begins, _ = alone.sweeper.adjoint_entering(alone.segments, LEAD, final, other, want_decay=False)
    given, begun = unless(certificate, len(case.segments)), unread(*case.starts.shape)
    case.sweeper.retry_adjoint(given, case.segments, LEAD, case.starts, final, data, begun, want_decay=False)
    found, expected = [case.starts, begun, data.gate_grads], [ends, begins, other.gate_grads]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gru", "lstm", "tanh"])
def test_nothing_is_touched_where_the_certificate_is_met(kind: str) -> None:
    case = Case(kind, reverse=False)
    given = unless(MET, len(case.segments))
    case.sweeper.retry(given, case.segments, LEAD, case.starts, case.states, want_decay=False)
    case.sweeper.mend(given, case.states)
    assert all(part.isnan().all() for part in (case.starts, *case.states))
    back = Case(kind, reverse=True)
    data, begun = back.gradients(), unread(*back.starts.shape)
    final = torch.randn_like(back.problem.initial)
    back.sweeper.retry_adjoint(given, back.segments, LEAD, back.starts, final, data, begun, want_decay=False)
    back.sweeper.mend_adjoint(given, final, data, begun[: len(final)])
    assert data.gate_grads is not None
    assert all(part.isnan().all() for part in (back.starts, begun, data.gate_grads))


@pytest.mark.parametrize("kind", ["gru", "lstm", "tanh"])
def test_one_chunk_where_a_certificate_is_missed(kind: str) -> None:
    case = Case(kind, reverse=True)
    data, given = case.gradients(), unless(2 * LIMIT, len(case.segments))
    case.sweeper.mend(given, case.states)
    torch.testing.assert_close([part[1:] for part in case.states], [part[1:] for part in data.states], rtol=0, atol=0)
    final, begun = torch.randn_like(case.problem.initial), unread(*case.problem.initial.shape)
    case.sweeper.mend_adjoint(given, final, data, begun)
    other = Case(kind, reverse=True)
    exact = other.gradients()
    whole = cut_evenly(case.problem.steps, case.problem.batch, case.problem.steps, True)
    begins, _ = other.sweeper.adjoint(whole, final, exact)
    torch.testing.assert_close([begun, data.gate_grads], [begins, exact.gate_grads], rtol=0, atol=0)
