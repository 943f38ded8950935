"""An LSTM on a CPU beside torch's own: layer by layer, whichever should be faster; the same numbers either way."""

from __future__ import annotations

import math
import time
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import timeloom as tl
from timeloom.auto.experience import FIRST_PAUSE
from timeloom.auto.layer_experience import LayerExperience
from timeloom.kernels.cpu import build
from timeloom.solve import beside_torch, look, trunk
from timeloom.solve.beside_torch import own_beside_torchs
from timeloom.solve.inputs import Inputs
from timeloom.solve.plan import Plan
from timeloom.solve.trunk import LayerSolve
from timeloom.solvers.auto import Auto

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(build.unavailable() is not None, reason="no compiled kernels"),
]
BY_TORCH = "run by torch's own layer"
STEPS = 1200
LONG = 4096
"""Steps that are worth a rehearsal."""


@pytest.fixture(autouse=True)
def torchs_is_faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rehearsal shows, where a test does not say otherwise."""
    ratio = 0.8 if "own_is_faster" in request.fixturenames else 1.3
    if "rehearsed" not in request.fixturenames:
        monkeypatch.setattr(beside_torch, "own_beside_torchs", lambda *_: ratio)


@pytest.fixture
def own_is_faster() -> None:
    """One chunk of ours takes less time than torch's."""


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are timed, as nothing is known yet."""
    monkeypatch.setattr(beside_torch, "_REHEARSED", {})


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What looks at the memory of a network have found."""
    found: list[int] = []

    def noted(*given: object) -> int:
        found.append(steps_to_forget(*given))  # type: ignore[arg-type]
        return found[-1]

    steps_to_forget = look.steps_to_forget
    monkeypatch.setattr(look, "steps_to_forget", noted)
    return found


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        return self.function(*given)


def pair(layers: int, slow: list[int], **options: bool) -> tuple[nn.LSTM, tl.LSTM]:
    """Torch's layers and ours with the same weights; the `slow` ones hardly forget."""
    torch.manual_seed(0)
    theirs = nn.LSTM(3, 8, layers, **options)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.startswith("bias_hh") and int(name.split("_l")[1][0]) in slow:
                parameter[8:16] += 8
    ours = tl.LSTM(3, 8, layers, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(layer: nn.LSTM, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y, (h, c) = layer(x)
    (y.square().mean() + h.sum() + (c * c).sum()).backward()
    return [y.detach(), h.detach(), c.detach(), x.grad, *(p.grad for p in layer.parameters())]


def errors(given: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((one.double() - two).abs().max() / two.abs().max()) for one, two in zip(given, truth, strict=True)]


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False}, {"batch_first": True}])
def test_the_numbers_are_torchs_layer_by_layer(options: dict[str, bool]) -> None:
    slow = [] if options.get("bias") is False else [1]
    theirs, ours = pair(2, slow, **options)
    x = torch.randn(1, STEPS, 3) if options.get("batch_first") else torch.randn(STEPS, 1, 3)
    truth = run(deepcopy(theirs).double(), x.double())
    torchs = errors(run(theirs, x), truth)
    for _ in range(3):
        for given, unavoidable in zip(errors(run(ours, x), truth), torchs, strict=True):
            assert given <= 2 * unavoidable + 2e-6
    each = 2 if options.get("bidirectional") else 1
    told = [BY_TORCH in report.reason for report in ours.reports]
    assert told == [False] * each + [bool(slow)] * each


def test_a_layer_that_forgets_again_is_swept_again() -> None:
    _, ours = pair(1, [0])
    x = torch.randn(STEPS, 1, 3)
    run(ours, x)
    assert BY_TORCH in ours.reports[0].reason
    with torch.no_grad():
        ours.bias_hh_l0[8:16] -= 8
    told = []
    for _ in range(FIRST_PAUSE + 4):
        run(ours, x)
        told.append(BY_TORCH in ours.reports[0].reason)
    assert told[0]
    assert not told[-1]


def test_looks_are_rare_and_no_sweep_is_made_in_vain(looks: list[int]) -> None:
    _, ours = pair(1, [0])
    x = torch.randn(STEPS, 1, 3)
    for _ in range(20):
        run(ours, x)
        assert BY_TORCH in ours.reports[0].reason
    assert len(looks) <= 3
    assert min(looks) > STEPS


def test_second_order_gradients_are_torchs() -> None:
    theirs, ours = pair(1, [0])
    x = torch.randn(STEPS, 1, 3)
    found = []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(layer(leaf)[0].square().mean(), leaf, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum() * 1e6, layer.weight_hh_l0)[0])
    assert BY_TORCH in ours.reports[0].reason
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_a_checkpoint_finds_what_it_has_saved() -> None:
    theirs, ours = pair(1, [0])
    x = torch.randn(STEPS, 1, 3)
    for _ in range(12):
        found = []
        for layer in (theirs, ours):
            leaf = x.clone().requires_grad_()
            checkpoint(lambda x, layer=layer: layer(x)[0], leaf, use_reentrant=False).square().mean().backward()
            found.append(leaf.grad)
        assert errors(found[1:], found[:1])[0] < 1e-4


@pytest.mark.usefixtures("own_is_faster")
def test_our_own_chunk_runs_where_it_is_the_faster_one(looks: list[int]) -> None:
    """Nothing is swept in vain for it: looks at a few steps tell, and are rare."""
    theirs, ours = pair(1, [0])
    x = torch.randn(STEPS, 1, 3)
    truth = run(deepcopy(theirs).double(), x.double())
    for _ in range(20):
        assert max(errors(run(ours, x), truth)) < 2e-5
        report = ours.reports[0]
        assert report.backward is not None
        for one in (report, report.backward):
            assert one.chunk == STEPS
            assert BY_TORCH not in one.reason
    assert len(looks) <= 4


@pytest.mark.usefixtures("own_is_faster")
def test_what_forgets_is_cut_there_too() -> None:
    _, ours = pair(2, [1])
    x = torch.randn(STEPS, 1, 3)
    for _ in range(3):
        run(ours, x)
    assert ours.reports[0].chunk < STEPS
    assert ours.reports[1].chunk == STEPS


# ---- rehearsals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slower", "by_torch"), [("ours", True), ("torch", False)])
@pytest.mark.usefixtures("rehearsed")
def test_the_faster_side_runs(slower: str, by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A side that is made to wait loses, however fast it is."""

    def waiting(function: Any) -> Any:
        def run(*given: Any) -> Any:
            time.sleep(1e-4 * len(given[-1].x))
            return function(*given)

        return run

    if slower == "torch":
        monkeypatch.setattr(beside_torch, "lstm", waiting(beside_torch.lstm))
    else:
        monkeypatch.setattr(LayerSolve, "_in_one_chunk", waiting(LayerSolve._in_one_chunk))
    _, ours = pair(1, [0])
    run(ours, torch.randn(LONG, 1, 3))
    assert (BY_TORCH in ours.reports[0].reason) == by_torch


@pytest.mark.usefixtures("rehearsed")
def test_a_size_is_rehearsed_once_and_by_a_part_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    torchs = beside_torch.lstm

    def noted(inputs: Inputs) -> tuple[Tensor, Tensor]:
        if len(inputs.x) <= beside_torch.MOST:  # else it is the call itself, which torch runs where it was faster
            steps.append(len(inputs.x))
        return torchs(inputs)

    monkeypatch.setattr(beside_torch, "lstm", noted)
    _, ours = pair(1, [])
    for _ in range(3):
        run(ours, torch.randn(LONG, 1, 3))
    assert steps == [64, 64, 256, 256]
    run(ours, torch.randn(LONG // 2, 1, 3))
    assert steps[4:] == [32, 32, 128, 128]
    with torch.no_grad():
        ours(torch.randn(LONG, 1, 3))
    assert steps[-1] == 256  # without gradients it is another question
    again = len(steps)
    run(pair(1, [])[1], torch.randn(LONG, 1, 3))
    for length in (4097, 5000, 8000):  # rounded down to as many steps
        run(ours, torch.randn(length, 1, 3))
    assert len(steps) == again


@pytest.mark.parametrize("hidden", [8, 160], ids=["one call", "wide"])
@pytest.mark.parametrize("taped", [True, False])
def test_a_call_that_is_cut_is_looked_at_and_planned_once(
    hidden: int, taped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans that tell who runs it are those it is run by."""
    plans: list[Plan] = []
    asked: list[object] = []
    decide, looked = Auto._decide, trunk.look

    def deciding(*given: Any, **named: Any) -> Plan:
        plans.append(decide(*given, **named))
        return plans[-1]

    monkeypatch.setattr(Auto, "_decide", deciding)
    monkeypatch.setattr(trunk, "look", lambda *given: (asked.append(given), looked(*given)))
    monkeypatch.setattr(beside_torch, "gains", lambda *_: True)
    monkeypatch.setattr(beside_torch, "own_beside_torchs", lambda *_: 1.3)
    monkeypatch.setattr(beside_torch, "needed_gain", lambda *_: 1.0)
    ours = tl.LSTM(3, hidden)
    x = torch.randn(4 * STEPS, 1, 3)
    if taped:
        run(ours, x)
    else:
        with torch.no_grad():
            ours(x)
    report = ours.reports[0]
    assert report.chunk == plans[0].chunk < len(x)
    assert report.warmup == plans[0].warmup
    assert len(plans) == 1 + taped
    assert len(asked) == 1
    if taped:
        assert report.backward is not None
        assert report.backward.chunk == plans[1].chunk


@pytest.mark.usefixtures("rehearsed")
def test_rehearsals_of_few_sizes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_torch, "MOST_REHEARSED", 2)
    for hidden in (4, 5, 6):
        run(tl.LSTM(3, hidden), torch.randn(LONG, 1, 3))
    assert {units for *_, units, _, _ in beside_torch._REHEARSED} == {6}


@pytest.mark.parametrize(("units", "by_torch"), [(8, False), (80, False), (160, True)])
@pytest.mark.usefixtures("rehearsed")
def test_a_short_call_is_not_rehearsed(units: int, by_torch: bool, looks: list[int]) -> None:
    """It would take as long as the call. What remembers is torch's, but for narrow layers, and is looked at once."""
    torch.manual_seed(0)
    ours = tl.LSTM(3, units)
    with torch.no_grad():
        ours.bias_hh_l0[units : 2 * units] += 8
    x = torch.randn(STEPS, 1, 3)
    for _ in range(20):
        run(ours, x)
        assert (BY_TORCH in ours.reports[0].reason) == by_torch
    assert not beside_torch._REHEARSED
    assert not by_torch or not looks


@pytest.mark.usefixtures("rehearsed")
def test_what_forgets_quickly_is_cut_unrehearsed() -> None:
    torch.manual_seed(0)
    ours = tl.LSTM(3, 80)
    run(ours, torch.randn(STEPS, 1, 3))
    assert ours.reports[0].chunk < STEPS
    assert not beside_torch._REHEARSED


@pytest.mark.usefixtures("rehearsed")
def test_short_calls_are_rehearsed_once_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_torch, "AMORTISED", 4)
    ours, x = tl.LSTM(3, 160), torch.randn(STEPS, 1, 3)
    calls = 0
    while not beside_torch._REHEARSED and calls < 20:
        run(ours, x)
        calls += 1
    assert calls == 2 + math.ceil(4 * beside_torch.WORTH_REHEARSING[True] / STEPS)


@pytest.mark.usefixtures("rehearsed")
def test_a_stack_that_torch_runs_is_one_call_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one of its layers is due for a look; the reports stay."""
    by_layer = Counted(beside_torch.lstm)
    monkeypatch.setattr(beside_torch, "lstm", by_layer)
    theirs, ours = nn.LSTM(3, 160, 2), tl.LSTM(3, 160, 2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(STEPS, 1, 3)
    for _ in range(4):
        for one, two in zip(run(ours, x), run(theirs, x), strict=True):
            torch.testing.assert_close(one, two)
        assert [BY_TORCH in report.reason for report in ours.reports] == [True, True]
    assert by_layer.calls == 2
    run(ours, x[:-1])
    assert by_layer.calls == 4, "other lengths are looked at"


@pytest.mark.usefixtures("rehearsed")
def test_what_a_call_costs_beside_its_steps_is_not_taken_for_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side that waits once a call loses little of a long one: it may win there, however slow its rehearsal is."""

    def seconds(run: Any, inputs: Inputs, taped: bool) -> float:
        own = getattr(run, "__name__", "") != "<lambda>"
        return 0.01 + 1e-6 * len(inputs.x) if own else 1e-5 * len(inputs.x)

    monkeypatch.setattr(beside_torch, "_seconds", seconds)
    _, ours = pair(1, [])
    solve = ours._solve_of(0, {})
    found = []
    for steps in (LONG // 2, 64 * LONG):
        inputs = Inputs(torch.randn(steps, 1, 3), torch.zeros(1, 16), *ours.all_weights[0], None)
        found.append(own_beside_torchs(inputs, solve._in_one_chunk, LayerExperience()))
    assert found == pytest.approx([(0.01 + 1e-6 * steps) / (1e-5 * steps) for steps in (LONG // 2, 64 * LONG)])


@pytest.mark.usefixtures("rehearsed")
def test_no_clock_decides_where_runs_are_to_repeat() -> None:
    _, ours = pair(1, [0])
    torch.use_deterministic_algorithms(True)
    try:
        run(ours, torch.randn(LONG, 1, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert BY_TORCH not in ours.reports[0].reason
    assert not beside_torch._REHEARSED


@pytest.mark.usefixtures("rehearsed")
def test_a_rehearsal_leaves_no_trace() -> None:
    """No gradients in the user's tensors, and nothing learned of the network."""
    _, ours = pair(1, [])
    x = torch.randn(LONG, 1, 3, requires_grad=True)
    experience = LayerExperience()
    solve = replace(ours._solve_of(0, {}), experience=experience)
    inputs = Inputs(x, torch.zeros(1, 16), *ours.all_weights[0], None)
    assert own_beside_torchs(inputs, solve._in_one_chunk, experience) > 0
    assert x.grad is None
    assert all(parameter.grad is None for parameter in ours.parameters())
    assert experience == LayerExperience()
