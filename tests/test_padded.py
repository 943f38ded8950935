"""Sequences of different lengths without gradients, whose padding is run, too: as by kernels that know lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import timeloom as tl
from timeloom.auto import thresholds
from timeloom.kernels.cpu.build import unavailable
from timeloom.nn import padded

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(unavailable() is not None, reason="needs compiled kernels"),
]
STEPS, BATCH = 300, 5
LENGTHS = torch.tensor([300, 211, 300, 97, 280])


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each layer and direction that was run so."""
    calls: list[int] = []
    right = padded.run
    monkeypatch.setattr(padded, "run", lambda *given: (calls.append(1), right(*given))[1])
    return calls


def pair(name: str, **options: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Ours, torch's, and torch's in float64."""
    torch.manual_seed(0)
    theirs, exact = (getattr(nn, name)(3, 16, **options, dtype=dtype) for dtype in (torch.float32, torch.float64))
    ours = getattr(tl, name)(3, 16, **options)
    for model in (ours, exact):
        model.load_state_dict(theirs.state_dict())
    return ours, theirs, exact


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str)
@pytest.mark.parametrize("name", ["GRU", "RNN"])
def test_packed_sequences(name: str, options: dict[str, Any], given_state: bool, ran: list[int]) -> None:
    ours, theirs, exact = pair(name, **options)
    first = "batch_first" in options
    x = torch.randn((BATCH, STEPS, 3) if first else (STEPS, BATCH, 3))
    hx = torch.randn(2 * 2 if options else 1, BATCH, 16) if given_state else None
    packed = pack_padded_sequence(x, LENGTHS, batch_first=first, enforce_sorted=False)
    with torch.no_grad():
        for _ in range(3):
            y, h = ours(packed, hx)
        torchs, torchs_h = theirs(packed, hx)
        truth, truth_h = exact(packed.to(torch.float64), None if hx is None else hx.double())
    assert len(ran) == 3 * (4 if options else 1)
    assert off(y.data, truth.data) <= 2 * off(torchs.data, truth.data) + 1e-6
    assert off(h, truth_h) <= 2 * off(torchs_h, truth_h) + 1e-6


@pytest.mark.parametrize("name", ["GRU", "RNN"])
def test_given_lengths_of_which_one_is_none(name: str, ran: list[int]) -> None:
    ours, theirs, _ = pair(name)
    lengths, x, hx = LENGTHS.clone(), torch.randn(STEPS, BATCH, 3), torch.randn(1, BATCH, 16)
    lengths[3] = 0
    x[250:, 1] = float("nan")
    with torch.no_grad():
        y, h = ours(x, hx, lengths=lengths)
        assert ran == [1]
        for row, length in enumerate(lengths.tolist()):
            assert not y[length:, row].any()
            if length:
                expected, last = theirs(x[:length, row : row + 1], hx[:, row : row + 1].contiguous())
                torch.testing.assert_close(y[:length, row : row + 1], expected, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(h[:, row : row + 1], last, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(h[:, 3], hx[:, 3])


@pytest.mark.parametrize("case", ["taped", "resets", "shooting", "mostly padding", "an LSTM"])
def test_all_else_is_run_by_lengths(case: str, ran: list[int]) -> None:
    name = "LSTM" if case == "an LSTM" else "GRU"
    ours: Any = getattr(tl, name)(3, 16, solver="shooting" if case == "shooting" else "auto")
    lengths = LENGTHS // 3 if case == "mostly padding" else LENGTHS
    resets = torch.zeros(STEPS, BATCH, dtype=torch.bool) if case == "resets" else None
    with torch.set_grad_enabled(case == "taped"):
        ours(torch.randn(STEPS, BATCH, 3), lengths=lengths, resets=resets)
    assert not ran


@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("name", ["GRU", "RNN"])
def test_packed_sequences_that_are_mostly_padding_are_torchs(name: str, taped: bool) -> None:
    ours, theirs, _ = pair(name)
    share = thresholds.FULL[name][0 if taped else 1]
    for part, torchs in ((share - 0.1, True), (share + 0.1, False)):
        lengths = torch.full((20,), round(STEPS * part))
        lengths[0] = STEPS
        packed = pack_padded_sequence(torch.randn(STEPS, 20, 3), lengths, enforce_sorted=False)
        with torch.set_grad_enabled(taped):
            y, _ = ours(packed)
        assert ours.reports[0].ran_in_torch == torchs
        torch.testing.assert_close(y.data, theirs(packed)[0].data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "hidden", "batch", "part", "torchs"),
    [
        (256, 256, 64, 0.57, True),
        (256, 256, 64, 0.75, False),
        (256, 256, 32, 0.57, False),
        (256, 128, 64, 0.57, False),
        (8, 256, 64, 0.57, False),
    ],
)
def test_many_packed_sequences_of_a_wide_gru_need_less_padding(
    inputs: int, hidden: int, batch: int, part: float, torchs: bool
) -> None:
    ours, lengths = tl.GRU(inputs, hidden), torch.full((batch,), round(100 * part))
    lengths[0] = 100
    with torch.no_grad():
        ours(pack_padded_sequence(torch.randn(100, batch, inputs), lengths))
    assert ours.reports[0].ran_in_torch == torchs
