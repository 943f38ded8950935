"""Calls of few steps, which torch's layer runs: as torch has them, and without its checks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import timeloom as tl
from timeloom.nn import torch_layer

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("GRU", "LSTM", "RNN")


def pair(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    theirs = getattr(nn, name)(3, 5, **options)
    ours = getattr(tl, name)(3, 5, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def flat(result: Any) -> list[Tensor]:
    y, final = result
    return [y.data if isinstance(y, PackedSequence) else y, *(final if isinstance(final, tuple) else (final,))]


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each call that went the short way."""
    calls: list[int] = []
    right = torch_layer.call_again
    monkeypatch.setattr(torch_layer, "call_again", lambda *given: (calls.append(1), right(*given))[1])
    return calls


@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_torchs(name: str, options: dict[str, Any], taped: bool, again: list[int]) -> None:
    ours, theirs = pair(name, **options)
    h = torch.randn(2 * 2 if "num_layers" in options else 1, 2, 5)
    for hx in (None, (h, -h) if name == "LSTM" else h):
        for _ in range(3):
            x = torch.randn(2, 2, 3)
            with torch.set_grad_enabled(taped):
                found, expected = flat(ours(x, hx)), flat(theirs(x, hx))
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
                assert one.requires_grad == taped
            if taped:
                for model, results in ((ours, found), (theirs, expected)):
                    model.zero_grad()
                    sum(part.square().sum() for part in results).backward()
                for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                    assert torch.equal(one.grad, other.grad)
            assert "torch's own layer" in ours.reports[-1].reason
    assert len(again) == 6


@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_single_sequence_goes_the_short_way_too(
    name: str, options: dict[str, Any], taped: bool, again: list[int]
) -> None:
    ours, theirs = pair(name, **options)
    h = torch.randn(2 * 2 if "num_layers" in options else 1, 5)
    for hx in (None, *(((h, -h), [h, -h]) if name == "LSTM" else (h,))):
        for steps in (1, 2, 7):
            x = torch.randn(steps, 3)
            with torch.set_grad_enabled(taped):
                found, expected = flat(ours(x, hx)), flat(theirs(x, hx))
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
                assert one.requires_grad == taped
            assert f"{steps} steps are too few" in ours.reports[-1].reason
    assert len(again) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_state_of_a_single_sequence_is_refused_as_by_torch(name: str) -> None:
    ours, theirs = pair(name)
    x = torch.randn(2, 3)
    ours(x)
    for shape in ((1, 1, 5), (1, 4), (2, 5), (5,)):
        wrong: Any = torch.zeros(shape)
        wrong = (wrong, wrong) if name == "LSTM" else wrong
        said = []
        for model in (ours, theirs):
            with pytest.raises(RuntimeError) as told:
                model(x, wrong)
            said.append(str(told.value))
        assert said[0] == said[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_autocast(name: str, taped: bool, dtype: torch.dtype, again: list[int]) -> None:
    ours, theirs = pair(name, num_layers=2)
    for steps in (1, 2, 5):
        batch = torch.randn(steps, 2, 3).to(dtype)
        for x in (batch, batch[:, 0], pack_padded_sequence(batch, torch.tensor([steps, 1]))):
            with torch.set_grad_enabled(taped), torch.autocast("cpu", torch.bfloat16):
                found, expected = flat(ours(x)), flat(theirs(x))
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
                assert one.requires_grad == taped
    assert len(again) >= 9


def test_projections(again: list[int]) -> None:
    ours, theirs = pair("LSTM", proj_size=2)
    for _ in range(3):
        x = torch.randn(2, 4, 3)
        for one, other in zip(flat(ours(x)), flat(theirs(x)), strict=True):
            assert torch.equal(one, other)
    assert len(again) == 3


@pytest.mark.parametrize("name", NAMES)
def test_new_weights_shapes_and_modes_are_seen(name: str, again: list[int]) -> None:
    ours, theirs = pair(name)
    x = torch.randn(2, 2, 3)
    for _ in range(3):
        ours(x)
    for model in (ours, theirs):
        model.weight_hh_l0 = nn.Parameter(theirs.weight_hh_l0.detach() * 2)
    assert torch.equal(ours(x)[0], theirs(x)[0])
    for other in (torch.randn(3, 2, 3), torch.randn(2, 3), torch.randn(2, 5, 3), x):
        assert torch.equal(ours(other)[0], theirs(other)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x)[0].dtype == theirs(x)[0].dtype
    copied = deepcopy(ours).double()
    assert copied(x.double())[0].dtype == torch.float64
    ours.solver = tl.solvers.Shooting(chunk=1)
    ours(x)
    assert ours.reports[0].chunk == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_state_is_refused_as_by_torch(name: str) -> None:
    ours, theirs = pair(name)
    x = torch.randn(2, 2, 3)
    for _ in range(3):
        ours(x)
    wrong: Any = torch.zeros(1, 2, 4)
    wrong = (wrong, wrong) if name == "LSTM" else wrong
    said = []
    for model in (ours, theirs):
        with pytest.raises(RuntimeError, match="Expected hidden") as told:
            model(x, wrong)
        said.append(str(told.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("sorted_by_length", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences(name: str, sorted_by_length: bool, taped: bool, again: list[int]) -> None:
    ours, theirs = pair(name, num_layers=2, bidirectional=True)
    h = torch.randn(4, 3, 5)
    for hx in (None, (h, -h) if name == "LSTM" else h):
        for lengths in ([4, 3, 1], [5, 3, 3]) if sorted_by_length else ([2, 4, 1], [1, 1, 6]):
            packed = pack_padded_sequence(torch.randn(6, 3, 3), torch.tensor(lengths), enforce_sorted=sorted_by_length)
            with torch.set_grad_enabled(taped):
                found, expected = ours(packed, hx), theirs(packed, hx)
            for one, other in zip(found[0], expected[0], strict=True):
                assert (one is None and other is None) or torch.equal(one, other)
            for one, other in zip(flat(found), flat(expected), strict=True):
                assert torch.equal(one, other)
                assert one.requires_grad == taped
            assert f"{max(lengths)} steps are too few" in ours.reports[3].reason
    assert len(again) == 4


@pytest.mark.parametrize("name", NAMES)
def test_no_shape_is_new(name: str, again: list[int]) -> None:
    """Texts vary in length: a call whose shape has not been met goes the same short way."""
    ours, theirs = pair(name, batch_first=True)
    for steps in range(1, 11):
        for batch in range(1, 15):
            x = torch.randn(batch, steps, 3)
            assert torch.equal(ours(x)[0], theirs(x)[0])
            assert f"{steps} steps are too few" in ours.reports[0].reason
    assert len(again) == 140


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_refuses_is_refused_as_by_torch(name: str) -> None:
    ours, theirs = pair(name)
    packed = pack_padded_sequence(torch.randn(4, 2, 3), torch.tensor([4, 3]))
    h = torch.zeros(1, 3, 5)
    ours(packed)
    wrong: list[tuple[Any, Any]] = [
        (torch.randn(2, 2, 4), None), (torch.randn(2, 2, 3).double(), None), (torch.randn(2, 2, 2, 3), None),
        (packed, (h, h) if name == "LSTM" else h), (packed.to(torch.float64), None),
    ]  # fmt: skip
    for x, hx in wrong:
        said = []
        for model in (ours, theirs):
            with pytest.raises((RuntimeError, ValueError)) as told:
                model(x, hx)
            said.append(str(told.value))
        assert said[0] == said[1]
    with pytest.raises(ValueError, match="carries its own lengths"):
        ours(packed, resets=torch.zeros(4, 2, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_of_a_short_call_takes_any_batch(name: str) -> None:
    ours, theirs = pair(name)
    for _ in range(3):
        ours(torch.randn(2, 2, 3))
    traced = torch.jit.trace(ours, (torch.randn(2, 2, 3),), check_trace=False)
    x = torch.randn(2, 5, 3)
    assert torch.equal(traced(x)[0], theirs(x)[0])
