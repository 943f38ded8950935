"""How long networks remember: exponents that can be computed by hand, or by the Jacobians of all steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import timeloom as tl
from timeloom.inspection.memory import LONGEST, Memory, memories, memory_of, recurrences

pytestmark = pytest.mark.usefixtures("one_thread")


def leaky(keep: float, dtype: torch.dtype = torch.float64) -> tl.GRU:
    """A GRU whose state shrinks by `keep` at every step, whatever comes in: its update gate is constant."""
    gru = tl.GRU(2, 3, dtype=dtype)
    with torch.no_grad():
        for parameter in gru.parameters():
            parameter.zero_()
        gru.bias_ih_l0[3:6] = math.log(keep / (1 - keep))
    return gru


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("keep", [0.5, 0.9, 0.999, 1e-3])
def test_the_exponent_of_a_leak_is_its_logarithm(keep: float, dtype: torch.dtype) -> None:
    (problem,) = recurrences(leaky(keep, dtype), torch.randn(200, 2, 2, dtype=dtype))
    memory = memory_of(problem, 1e-6)
    assert memory.exponent == pytest.approx(math.log(keep), rel=1e-3)
    assert memory.steps == math.ceil(math.log(1e-6) / memory.exponent)
    assert memory.looked_at == 200


@pytest.mark.parametrize(("mode", "scale"), [("GRU", 1.0), ("GRU", 3.0), ("LSTM", 1.0), ("RNN", 1.0), ("RNN", 4.0)])
def test_it_is_the_exponent_of_the_jacobians(mode: str, scale: float) -> None:
    torch.manual_seed(0)
    layer = getattr(tl, mode)(3, 8, dtype=torch.float64)
    layer.weight_hh_l0.data *= scale
    x = torch.randn(1500, 1, 3, dtype=torch.float64)
    (problem,) = recurrences(layer, x)
    cell = getattr(nn, f"{mode}Cell")(3, 8, dtype=torch.float64)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})

    def step(state: object, x: torch.Tensor) -> object:
        return cell(x, state)

    zeros = torch.zeros(1, 8, dtype=torch.float64)
    expected = tl.lyapunov_exponents(step, (zeros, zeros) if mode == "LSTM" else zeros, x, discard=150)
    assert memory_of(problem, 1e-6).exponent == pytest.approx(float(expected), abs=0.02)


def test_words() -> None:
    assert "forgets: largest Lyapunov exponent -0.0139 a step" in Memory(-0.013863, 1e-6, 100).words
    assert "half of a difference is gone after 50 steps" in Memory(-0.013863, 1e-6, 100).words
    assert "after about 997 steps" in Memory(-0.013863, 1e-6, 100).words
    chaos = Memory(0.2, 1e-6, 100)
    assert chaos.steps is None
    assert "does not forget: largest Lyapunov exponent +0.2 a step" in chaos.words


def test_every_layer_and_direction_of_what_a_module_is_given() -> None:
    """Each along its own inputs; of one sequence, at most so many steps of it, ragged or packed or batch first."""
    torch.manual_seed(0)
    stacked = tl.GRU(2, 4, num_layers=2, bidirectional=True)
    x = torch.randn(50, 3, 2)
    found = memories([stacked], lambda: stacked(x), [1e-6] * 4)
    assert len(found) == 4
    assert len({memory.exponent for memory in found}) == 4
    assert all(memory.exponent < 0 and memory.looked_at == 50 for memory in found)
    single = leaky(0.9, torch.float32)
    first = tl.GRU(2, 3, batch_first=True)
    first.load_state_dict(single.state_dict())
    for module, run, steps in (
        (single, lambda: single(pack_sequence([x[:40, 0], x[:9, 1]])), 40),
        (single, lambda: single(x, lengths=torch.tensor([17, 50, 3])), 17),
        (single, lambda: single(x[:, 0]), 50),
        (first, lambda: first(x), 3),
        (single, lambda: single(torch.zeros(LONGEST + 9, 1, 2)), LONGEST),
    ):
        (memory,) = memories([module], run, [0.0])
        assert memory.looked_at == steps
        assert memory.exponent == pytest.approx(math.log(0.9), rel=1e-3)
        assert memory.tolerance == 1e-6
