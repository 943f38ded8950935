"""How long a network remembers, looked at before time is cut."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor

import timeloom as tl
from timeloom.auto.experience import Experience
from timeloom.kernels.cpu import build
from timeloom.solve import look as look_file
from timeloom.solve.inputs import Inputs, sizes_of
from timeloom.solve.look import ENOUGH, PLACES, apart, look, steps_to_forget

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason="no compiled kernels")
UNITS = 8


def remembering(steps: float, kind: str = "GRU") -> tl.GRU | tl.LSTM:
    """A layer that forgets by the same factor at every step: what is left of a difference after so many is ENOUGH."""
    kept = ENOUGH ** (1 / steps)
    torch.manual_seed(0)
    layer: tl.GRU | tl.LSTM = getattr(tl, kind)(3, UNITS)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.weight_ih_l0.normal_()
        layer.weight_ih_l0[UNITS : 2 * UNITS] = 0
        layer.bias_ih_l0[UNITS : 2 * UNITS] = math.log(kept / (1 - kept))
    return layer


def inputs_of(layer: tl.GRU | tl.LSTM, x: Tensor) -> Inputs:
    size = UNITS * (2 if isinstance(layer, tl.LSTM) else 1)
    return Inputs(x, torch.zeros(x.shape[1], size), *layer.all_weights[0], None)


def looked(layer: tl.GRU | tl.LSTM, x: Tensor, sides: list[Experience]) -> None:
    solve, inputs = layer._solve_of(0, {}), inputs_of(layer, x)
    look(inputs, sizes_of(solve.cell_of(inputs), inputs), sides, solve._problem)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
@pytest.mark.parametrize("memory", [20, 200, 3000])
def test_the_memory_of_a_network_is_found(memory: int, kind: str, batch: int) -> None:
    layer = remembering(memory, kind)
    solve, inputs = layer._solve_of(0, {}), inputs_of(layer, torch.randn(9000, batch, 3))
    with torch.no_grad():
        found = steps_to_forget(apart(inputs, solve._problem, PLACES, 48, 4000))
        beyond = steps_to_forget(apart(inputs, solve._problem, 1, 48, 100))
    assert min(0.85 * memory, 40) <= found <= max(1.3 * memory, 48)
    assert beyond > 100 or memory < 100


@pytest.mark.parametrize("stronger", [1.0, 8.0])
def test_a_network_that_does_not_forget_is_told(stronger: float) -> None:
    """One keeps what it has, the other one is chaotic."""
    layer = remembering(10**6) if stronger == 1 else tl.GRU(3, UNITS)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(stronger)
    sides = [Experience(), Experience()]
    looked(layer, torch.randn(4096, 1, 3), sides)
    for side in sides:
        assert side.warmup(1e-6) > 4096


def test_places_lie_apart_and_states_are_followed_on() -> None:
    """What is compared is what sweeps over these stretches in one go end with."""
    layer = tl.GRU(3, UNITS)
    with torch.no_grad():
        layer.bias_ih_l0[UNITS : 2 * UNITS] += 3
    x = torch.randn(3000, 3, 3)
    solve, inputs = layer._solve_of(0, {}), inputs_of(layer, x)
    with torch.no_grad():
        found = dict(apart(inputs, solve._problem, PLACES, 40, 120))
    assert sorted(found) == [40, 60, 90, 120]
    truth = deepcopy(layer).double()
    truth.solver = "sequential"
    for steps, jump in found.items():
        worst = 0.0
        for sequence, begin in ((0, 1440), (2, 2880)):
            along = x[begin : begin + steps, sequence : sequence + 1].double()
            with torch.no_grad():
                _, elsewhere = truth(x[:40, sequence : sequence + 1].double())
                _, one = truth(along)
                _, other = truth(along, elsewhere)
            worst = max(worst, float((one - other).abs().max() / torch.maximum(one.abs(), other.abs()).max()))
        assert jump == pytest.approx(worst, rel=1e-2, abs=3e-7)


@pytest.mark.parametrize("memory", [60, 400])
def test_a_first_call_is_certified_by_its_first_sweep(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # so that such a memory is worth a warm-up
    misses: list[float] = []
    monkeypatch.setattr(Experience, "note_miss", lambda _, __, error: misses.append(error))
    layer = remembering(memory)
    layer(torch.randn(16384, 1, 3))[0].sum().backward()
    report = layer.reports[0]
    for one in (report, report.backward):
        assert one is not None
        assert one.chunk < 16384
        assert 0.8 * memory <= one.warmup <= 1.5 * memory
    assert not misses


def test_nothing_is_looked_at_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it is known, where nothing is planned for now, where time is too short, or no compiled kernels run."""
    calls: list[int] = []
    monkeypatch.setattr(look_file, "steps_to_forget", lambda _: calls.append(1) or 50)
    layer, x = remembering(50), torch.randn(2048, 1, 3)
    known, resting = Experience(forgetting=0.5), Experience()
    resting.rest()
    looked(layer, x, [known, resting])
    looked(layer, x[:64], [Experience()])
    looked(layer.double(), x.double(), [Experience()])
    layer.float()
    layer(x, resets=torch.zeros(2048, 1, dtype=torch.bool))
    layer(x, lengths=torch.tensor([2000]))
    layer.solver = "shooting"
    layer(x)
    assert not calls
    looked(layer, x, [known, Experience()])
    assert calls
    assert known.forgetting == 0.5


def test_states_that_are_no_numbers_end_in_one_chunk() -> None:
    layer = remembering(50)
    with torch.no_grad():
        layer.weight_ih_l0.fill_(float("nan"))
    y, _ = layer(torch.randn(2048, 1, 3))
    assert y.isnan().all()
