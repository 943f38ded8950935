"""An LSTM on a CPU beside torch's own: layer by layer, whichever should be faster; the same numbers either way."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import timeloom as tl
from timeloom.kernels.cpu import build
from timeloom.solve import beside_torch
from timeloom.solve.beside_torch import AS_FAST, AS_FAST_FROM, is_as_fast, jump_after

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(build.unavailable() is not None, reason="no compiled kernels"),
]
BY_TORCH = "run by torch's own layer"
STEPS = 1200


@pytest.fixture(autouse=True)
def torchs_is_faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk as with several threads, where a test does not say otherwise."""
    if "own_is_as_fast" not in request.fixturenames:
        monkeypatch.setattr(beside_torch, "AS_FAST", 0)


@pytest.fixture
def own_is_as_fast() -> None:
    """One chunk as with one thread."""


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
    for _ in range(12):
        run(ours, x)
        told.append(BY_TORCH in ours.reports[0].reason)
    assert told[0]
    assert not told[-1]


def test_looks_are_rare_and_no_sweep_is_made_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair(1, [0])
    looks: list[float] = []

    def counted(*given: object) -> float:
        looks.append(jump_after(*given))  # type: ignore[arg-type]
        return looks[-1]

    monkeypatch.setattr(beside_torch, "jump_after", counted)
    x = torch.randn(STEPS, 1, 3)
    for _ in range(20):
        run(ours, x)
        assert BY_TORCH in ours.reports[0].reason
    assert len(looks) <= 3
    assert min(looks) > 1e-3


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


@pytest.mark.usefixtures("own_is_as_fast")
def test_one_thread_runs_narrow_layers_in_a_chunk_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is swept in vain for it: looks at a few steps tell, and are rare."""
    looks: list[float] = []

    def counted(*given: object) -> float:
        looks.append(jump_after(*given))  # type: ignore[arg-type]
        return looks[-1]

    monkeypatch.setattr(beside_torch, "jump_after", counted)
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


@pytest.mark.usefixtures("own_is_as_fast")
def test_one_thread_cuts_what_forgets() -> None:
    _, ours = pair(2, [1])
    x = torch.randn(STEPS, 1, 3)
    for _ in range(3):
        run(ours, x)
    assert ours.reports[0].chunk < STEPS
    assert ours.reports[1].chunk == STEPS


@pytest.mark.usefixtures("own_is_as_fast")
def test_wide_or_short_layers_and_several_threads_leave_one_chunk_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for taped, steps in AS_FAST_FROM.items():
        assert is_as_fast(AS_FAST, steps, taped)
        assert not is_as_fast(AS_FAST + 1, steps, taped)
        assert not is_as_fast(AS_FAST, steps - 1, taped)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not is_as_fast(16, 8192, taped=True)
