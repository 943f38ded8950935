"""Calls that are replays alone: results and gradients against torch in float64, and when they are not taken."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import replayed_on_cpu as emulated
import torch
from replayed_on_cpu import Chunks, Graph
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import timeloom as tl
from timeloom.kernels import replay
from timeloom.nn import base, steady
from timeloom.nn.steady import call_again
from timeloom.solve import trunk
from timeloom.solvers import auto
from timeloom.torch_state import streams

STEPS, BATCH, INPUTS, UNITS = 47, 2, 3, 4
CALLS_BEFORE = 4
"""Calls until both passes are recorded and found to be."""
KINDS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
each_kind = pytest.mark.parametrize("kind", KINDS)


WAITING, MENDED = "waiting", "mended"
"""For certificates; or not, since graphs mend what is not certified."""
waiting_alone = pytest.mark.parametrize("_on_a_cpu", [WAITING], indirect=True)


@pytest.fixture(autouse=True, params=[WAITING, MENDED])
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    with emulated.on_a_cpu(monkeypatch, request.param == MENDED):
        yield


@pytest.fixture
def trunk_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The solves that went through the trunk."""
    seen: list[str] = []
    for name, method in (("forward", "_forward"), ("backward", "backward")):
        honest = getattr(trunk.LayerSolve, method)

        def spy(*given: Any, name: str = name, honest: Any = honest, **more: Any) -> Any:
            seen.append(name)
            return honest(*given, **more)

        monkeypatch.setattr(trunk.LayerSolve, method, spy)
    return seen


def pair(kind: str, **options: Any) -> tuple[Any, Any]:
    ours = getattr(tl, kind)(INPUTS, UNITS, solver=Chunks(tol=2e-5), **options)
    exact = KINDS[kind](INPUTS, UNITS, **options).double()
    exact.load_state_dict(ours.state_dict())
    return ours, exact


def hidden(module: Any, live: bool = True) -> Any:
    shape = (module.num_layers * (2 if module.bidirectional else 1), BATCH, UNITS)
    parts = tuple(torch.randn(shape).requires_grad_(live) for _ in range(2 if module.mode == "LSTM" else 1))
    return parts if len(parts) > 1 else parts[0]


def like(given: Any, dtype: torch.dtype) -> Any:
    if isinstance(given, tuple):
        return tuple(like(part, dtype) for part in given)
    return None if given is None else given.detach().to(dtype).requires_grad_(given.requires_grad)


def results(module: Any, x: Tensor, hx: Any = None, use_final: bool = True) -> list[Tensor]:
    module.zero_grad()
    dtype = next(module.parameters()).dtype
    x, hx = like(x, dtype), like(hx, dtype)
    y, final = module(x, hx)
    final = final if isinstance(final, tuple) else (final,)
    loss = (y * torch.linspace(0.2, 1.0, y.numel(), dtype=dtype).view_as(y).sin()).sum()
    if use_final:
        loss = loss + sum((index + 1) * part.square().sum() for index, part in enumerate(final))
    found = [y.detach().clone(), *(part.detach().clone() for part in final)]
    if loss.requires_grad:
        loss.backward()
    live = [x, *(hx if isinstance(hx, tuple) else (hx,)), *module.parameters()]
    return found + [tensor.grad for tensor in live if tensor is not None and tensor.grad is not None]


def move(ours: Any, exact: Any, by: float = 0.01) -> None:
    """A step of an optimizer, in place."""
    with torch.no_grad():
        for own, right in zip(ours.parameters(), exact.parameters(), strict=True):
            own.add_(by * torch.randn_like(own))
            right.copy_(own)


def assert_right(ours: Any, exact: Any, x: Tensor, hx: Any = None, use_final: bool = True) -> None:
    found, right = results(ours, x, hx, use_final), results(exact, x, hx, use_final)
    for own, truth in zip(found, right, strict=True):
        assert float((own.double() - truth).abs().max()) <= 3e-4 * max(1.0, float(truth.abs().max()))


def settle(ours: Any, exact: Any, x: Tensor, hx: Any = None, use_final: bool = True) -> None:
    for _ in range(CALLS_BEFORE):
        assert_right(ours, exact, x, hx, use_final)
    assert ours._steady


OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
}


@pytest.mark.parametrize("given", ["nothing", "x", "x and hx"])
@pytest.mark.parametrize("options", OPTIONS)
@each_kind
def test_results_and_gradients_are_torchs(kind: str, options: str, given: str, trunk_calls: list[str]) -> None:
    """Inputs, initial states and weights change from call to call."""
    ours, exact = pair(kind, **OPTIONS[options])
    for call in range(CALLS_BEFORE + 3):
        x = torch.randn((BATCH, STEPS, INPUTS) if ours.batch_first else (STEPS, BATCH, INPUTS))
        x.requires_grad_(given != "nothing")
        hx = hidden(ours) if given == "x and hx" else None
        if call == CALLS_BEFORE:
            trunk_calls.clear()
        assert_right(ours, exact, x, hx, use_final=given != "nothing")
        move(ours, exact)
    assert trunk_calls == []
    for report in ours.reports:
        assert report.certified
        assert report.backward.residuals[0] <= report.backward.tolerance
        assert report.error_estimate is not None


@each_kind
def test_without_gradients(kind: str, trunk_calls: list[str]) -> None:
    ours, exact = pair(kind)
    with torch.no_grad():
        for _ in range(CALLS_BEFORE + 2):
            trunk_calls.clear()
            assert_right(ours, exact, torch.randn(STEPS, BATCH, INPUTS))
            move(ours, exact)
    assert trunk_calls == []
    with torch.no_grad():
        y, _ = ours(torch.randn(STEPS, BATCH, INPUTS))
    y.mul_(exact.weight_hh_l0.detach().float().requires_grad_().sum())
    with torch.inference_mode():
        for _ in range(CALLS_BEFORE):
            assert_right(ours, exact, torch.randn(STEPS, BATCH, INPUTS))


@waiting_alone
def test_a_missed_certificate_is_mended(trunk_calls: list[str]) -> None:
    """And what was missed is learned."""
    ours, exact = pair("GRU")
    x = torch.randn(5 * STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    with torch.no_grad():
        for module in (ours, exact):
            module.bias_hh_l0[UNITS : 2 * UNITS] += 0.6
    trunk_calls.clear()
    assert_right(ours, exact, x)
    assert trunk_calls == ["forward", "backward"]
    assert ours.reports[0].certified
    assert ours.reports[0].warmup > emulated.WARMUP
    settle(ours, exact, x)


def strict(recorded: Any) -> Any:
    return replace(recorded.standing.plan, tolerance=-1.0)


@waiting_alone
def test_a_missed_certificate_of_the_gradients(trunk_calls: list[str]) -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    (found,) = ours._steady.values()
    for kind, recorded in found.layers[0]._backward.items():
        found.layers[0]._backward[kind] = replace(recorded, standing=recorded.standing._replace(plan=strict(recorded)))
    trunk_calls.clear()
    assert_right(ours, exact, x)
    assert trunk_calls == ["backward"]
    assert ours.reports[0].backward.certified


def test_backward_passes_in_any_order() -> None:
    ours, exact = pair("LSTM")
    inputs = [torch.randn(STEPS, BATCH, INPUTS) for _ in range(3)]
    settle(ours, exact, inputs[0])
    grads = []
    for module in (ours, exact):
        dtype = next(module.parameters()).dtype
        module.zero_grad()
        first, second, third = (module(x.to(dtype))[0] for x in inputs)
        first.square().sum().backward(retain_graph=True)
        third.sin().sum().backward()
        second.cos().sum().backward()
        first.square().sum().backward()
        grads.append([weight.grad for weight in module.parameters()])
    for own, right in zip(*grads, strict=True):
        torch.testing.assert_close(own.double(), right, rtol=1e-4, atol=1e-4)


@each_kind
def test_gradients_of_gradients_and_many_at_once(kind: str) -> None:
    ours, exact = pair(kind)
    x = torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)
    settle(ours, exact, x)
    found = []
    for module in (ours, exact):
        given = like(x, next(module.parameters()).dtype)
        y, final = module(given)
        final = final[0] if isinstance(final, tuple) else final
        assert ours._steady
        pulls = torch.linspace(-1, 1, 2 * y.numel(), dtype=y.dtype).view(2, *y.shape)
        (many,) = torch.autograd.grad(y, given, pulls, is_grads_batched=True, retain_graph=True)
        loss = y.square().mean() + final.square().sum()
        (grad,) = torch.autograd.grad(loss, given, create_graph=True)
        module.zero_grad()
        grad.square().sum().backward()
        found.append([many, grad.detach(), *(weight.grad for weight in module.parameters() if weight.grad is not None)])
    for own, right in zip(*found, strict=True):
        torch.testing.assert_close(own.double(), right, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_finds_the_same_tensors_saved() -> None:
    """The call before is not steady, that of its backward pass is; and the other way round."""
    ours, exact = pair("LSTM")
    x = torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)
    for call in range(CALLS_BEFORE + 3):
        ours.zero_grad()
        y, _ = checkpoint(ours, x, use_reentrant=False)
        if call == CALLS_BEFORE + 1:
            ours._steady.clear()
        y.sin().sum().backward()
    exact(x.double())[0].sin().sum().backward()
    for own, right in zip(ours.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(own.grad.double(), right.grad, rtol=1e-4, atol=1e-4)


def test_what_was_given_is_guarded() -> None:
    ours, exact = pair("LSTM")
    x, hx = torch.randn(STEPS, BATCH, INPUTS), hidden(ours, live=False)
    settle(ours, exact, x, hx)
    y, _ = ours(x, hx)
    move(ours, exact)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, final = ours(x, hx)
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, final = ours(x, hx)
    assert ours._steady
    for part in (*hx, *final):
        part.detach().zero_()  # theirs to write into
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_another_call_is_another() -> None:
    """Frozen weights, weights that moved, other sizes, another initial state."""
    ours, exact = pair("GRU", num_layers=2)
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    for module in (ours, exact):
        module.weight_hh_l0.requires_grad_(False)
    settle(ours, exact, x)
    for module in (ours, exact):
        for weight in (module.weight_ih_l0, module.bias_ih_l0, module.bias_hh_l0):
            weight.requires_grad_(False)
    settle(ours, exact, x)
    settle(ours, exact, torch.randn(STEPS, BATCH, INPUTS, requires_grad=True))
    for own, right in zip(ours.parameters(), exact.parameters(), strict=True):
        own.data = own.data + 0.02 * torch.randn_like(own)
        right.data = own.data.double()
    assert_right(ours, exact, x)
    settle(ours, exact, x, hidden(ours, live=False))
    settle(ours, exact, torch.randn(STEPS + 9, BATCH + 1, INPUTS))
    ours.weight_hh_l1 = nn.Parameter(exact.weight_hh_l1.detach().float() * 0.5)
    exact.weight_hh_l1.data.mul_(0.5)
    settle(ours, exact, x)
    with pytest.raises(RuntimeError, match="hidden"):
        ours(x, torch.randn(2, BATCH, UNITS + 1))
    assert_right(ours, exact, x)


def test_dropped_recordings_give_their_memory_back(trunk_calls: list[str]) -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    (found,) = ours._steady.values()
    places = weakref.ref(found.layers[0].forward.recording.results[0])
    replay.RECORDINGS.clear()
    gc.collect()
    assert places() is None
    trunk_calls.clear()
    assert_right(ours, exact, x)
    assert trunk_calls == ["forward", "backward"]
    settle(ours, exact, x)
    y, _ = ours(x)
    replay.RECORDINGS.clear()  # between the passes
    y.sum().backward()


def test_the_least_used_recordings_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steady calls count as uses, though they do not ask for their recordings by name."""
    ours, exact = pair("GRU")
    other, _ = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    for module in (ours, other):
        for _ in range(CALLS_BEFORE):
            results(module, x)
    results(ours, x)
    kept = replay.RECORDINGS.size
    monkeypatch.setattr(replay, "_memory", lambda _: kept * replay.SHARE_OF_ALL)
    monkeypatch.setattr(replay, "SHARE_OF_ONE", 1)
    third, _ = pair("GRU")
    for _ in range(CALLS_BEFORE):
        results(third, x)
    assert replay.RECORDINGS.size <= kept
    for module, held in ((ours, True), (other, False)):
        (found,) = module._steady.values()
        assert found.layers[0].forward.recording.here is held
    assert_right(ours, exact, x)


def test_not_where_something_is_around_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    (found,) = ours._steady.values()
    assert found.fits(ours, x, None)
    with torch.autocast("cpu"):
        assert not found.fits(ours, x, None)
    with torch.no_grad():
        assert call_again(ours, x, None) is None
    assert call_again(ours, x, None) is not None
    assert call_again(ours, x[1:], None) is None
    ours.eval()
    assert call_again(ours, x, None) is None
    ours.train()
    monkeypatch.setattr(streams, "stream_of", lambda _: 1)
    assert not found.fits(ours, x, None)
    assert_right(ours, exact, x)
    monkeypatch.setattr(streams, "stream_of", lambda _: 0)
    monkeypatch.setattr(streams, "may_replay", lambda _: False)
    assert not found.fits(ours, x, None)


def test_a_backward_pass_on_another_stream(monkeypatch: pytest.MonkeyPatch, trunk_calls: list[str]) -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    y, _ = ours(x)
    trunk_calls.clear()
    monkeypatch.setattr(streams, "stream_of", lambda _: 1)
    y.sum().backward()
    assert trunk_calls == ["backward"]


def test_weights_for_one_call_are_not_held() -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    other = {name: 0.5 * weight.detach() for name, weight in ours.named_parameters()}
    right = {name: weight.double() for name, weight in other.items()}
    with torch.no_grad():
        for _ in range(CALLS_BEFORE):
            found, _ = torch.func.functional_call(ours, other, (x,))
            truth, _ = torch.func.functional_call(exact, right, (x.double(),))
            assert float((found.double() - truth).abs().max()) < 3e-4
    held = [weight for call in ours._steady.values() for _, weight, *_ in call.parameters]
    assert held
    assert all(isinstance(weight, nn.Parameter) for weight in held)
    assert_right(ours, exact, x)


def test_copies_find_their_own() -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    twin, file = copy.deepcopy(ours), io.BytesIO()
    assert not twin._steady
    torch.save(ours, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for module in (twin, loaded):
        with torch.no_grad():
            module.weight_hh_l0.mul_(0.5)
        right = copy.deepcopy(exact)
        with torch.no_grad():
            right.weight_hh_l0.mul_(0.5)
        settle(module, right, x)
    assert_right(ours, exact, x)


def test_a_module_is_freed_at_once() -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    weight = weakref.ref(ours.weight_hh_l0)
    replay.RECORDINGS.clear()  # those of a GPU hold no weights, these do
    gc.collect()
    gc.disable()
    try:
        del ours
        assert weight() is None
    finally:
        gc.enable()


def test_threads_share_a_module() -> None:
    ours, exact = pair("GRU")
    inputs = [torch.randn(STEPS, BATCH, INPUTS) for _ in range(3)]
    settle(ours, exact, inputs[0])
    with torch.no_grad():
        right = [exact(x.double())[0] for x in inputs]
    worst: list[float] = []

    def work(index: int) -> None:
        for _ in range(4):
            y, _ = ours(inputs[index])
            worst.append(float((y.detach().double() - right[index]).abs().max()))
            y.sum().backward()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 12
    assert max(worst) < 2e-5


@waiting_alone
def test_a_replay_that_comes_between_hides_the_certificate(trunk_calls: list[str]) -> None:
    """Nobody knows then whether it was met: the call is solved anew."""
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    (found,) = ours._steady.values()
    recording = found.layers[0].forward.recording
    honest, recording._certificate.awaited = (
        recording._stream.synchronize,
        True,
    )  # an earlier replay was not read: it is waited for
    recording._stream.synchronize = lambda: setattr(recording, "used", recording.used + 1)
    trunk_calls.clear()
    assert_right(ours, exact, x)
    assert trunk_calls == ["forward", "backward"]
    recording._stream.synchronize = honest
    settle(ours, exact, x)


def test_what_is_lent_is_copied_for_those_that_hold_it() -> None:
    ours, exact = pair("LSTM")
    inputs = [torch.randn(STEPS, BATCH, INPUTS) for _ in range(2)]
    settle(ours, exact, inputs[0])
    (found,) = ours._steady.values()
    recording = found.layers[0].forward.recording
    y, _ = ours(inputs[0])
    lent = y.grad_fn.saved_tensors[6:-1]
    assert recording.has(lent[0])
    before = [tensor.clone() for tensor in lent]
    ours(inputs[1])
    assert not recording.has(lent[0])
    for now, then in zip(lent, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0)
    y.sum().backward()
    del y, lent
    gc.collect()
    assert all(reference() is None for reference in recording._lent)


def test_a_step_takes_few_python_calls() -> None:
    """What a steady step adds to torch's own work, counted, since time on a busy machine tells nothing."""
    import sys

    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x, use_final=False)
    counts = []
    Graph.replay, honest = lambda self: self._room.zero_(), Graph.replay  # type: ignore[method-assign]
    try:
        for _ in range(2):
            calls = 0

            def count(frame: Any, event: str, _: Any) -> None:
                nonlocal calls
                calls += event in ("call", "c_call")

            sys.setprofile(count)
            y = ours(x)[0]
            sys.setprofile(None)
            counts.append(calls)
            y.sum().backward()
    finally:
        Graph.replay = honest  # type: ignore[method-assign]
    assert max(counts) < 150


def test_initial_states_of_another_kind_go_through_the_trunk(trunk_calls: list[str]) -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    trunk_calls.clear()
    learned = nn.Parameter(torch.randn(1, BATCH, UNITS))
    y, _ = ours(x, learned)
    assert "forward" in trunk_calls
    torch.testing.assert_close(y.double(), exact(x.double(), learned.double())[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError):
        ours(x, (torch.zeros(1, BATCH, UNITS),))


def test_calls_that_take_turns_are_all_steady_and_hold_little(trunk_calls: list[str]) -> None:
    ours, exact = pair("LSTM")
    x, hx = torch.randn(STEPS, BATCH, INPUTS), hidden(ours)
    for _ in range(2 * CALLS_BEFORE):
        results(ours, x)
        results(ours, x, hx)
    trunk_calls.clear()
    assert_right(ours, exact, x)
    assert_right(ours, exact, x, hx)
    assert not trunk_calls
    held = [len(recording._held) for _, recording in replay.RECORDINGS._recordings()]
    assert 0 < max(held) < 8
    ours.to(torch.float32)
    assert not ours._steady, "what holds weights that may have moved"


def test_sizes_without_end_hold_no_more_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_KEYS", 6)
    monkeypatch.setattr(steady, "MOST_KNOWN", 3)
    monkeypatch.setattr(base, "MOST_KNOWN", 3)
    monkeypatch.setattr(auto, "MOST_PLANS", 6)
    ours, _ = pair("GRU")
    held = []
    for sizes in (range(20, 32), range(32, 44), range(44, 56), range(56, 68)):
        for steps in sizes:
            for _ in range(CALLS_BEFORE):
                results(ours, torch.randn(steps, BATCH, INPUTS))
        gc.collect()
        held.append(len(gc.get_objects()))
    assert len(replay.RECORDINGS) > 0
    assert held[3] - held[2] < 20


def test_what_hooks_have_saved_is_what_gradients_are_made_of() -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x, use_final=False)
    found = []
    for module in (ours, exact):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            y, _ = module(x.to(module.weight_hh_l0.dtype))
        with torch.no_grad():
            module.weight_hh_l0.mul_(-2)
        found.append(torch.autograd.grad(y.sum(), module.weight_hh_l0)[0].double())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_weights_that_moved_between_the_passes(trunk_calls: list[str]) -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x, use_final=False)
    y, _ = ours(x)
    ours.weight_hh_l0.data = ours.weight_hh_l0.data.clone()
    trunk_calls.clear()
    found = torch.autograd.grad(y.sum(), ours.weight_hh_l0)[0]
    assert "backward" in trunk_calls
    right = torch.autograd.grad(exact(x.double())[0].sum(), exact.weight_hh_l0)[0]
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)


def test_outputs_without_gradients_may_be_written_into() -> None:
    ours, _ = pair("GRU", batch_first=True)
    x, factor = torch.randn(BATCH, STEPS, INPUTS), torch.ones(1, requires_grad=True)
    for _ in range(CALLS_BEFORE + 2):
        with torch.no_grad():
            y, _ = ours(x)
        y.mul_(factor)


def test_dropout_of_a_call_that_did_not_count_is_drawn_again() -> None:
    ours, _ = pair("GRU", num_layers=2, dropout=0.5)
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(2 * CALLS_BEFORE):
        ours(x)[0].sum().backward()
    found = []
    for missed in (False, True):
        (known,) = ours._steady.values()
        recording = known.layers[1].forward.recording
        if missed:
            recording.read = lambda turn: None
        torch.manual_seed(7)
        found.append(ours(x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("room", [2.5, 3.5, 4.5, 5.0, 5.5, 6.0])
def test_little_room_for_recordings_costs_no_call(room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for so many recordings: a backward pass may be recorded while its forward pass is the next to go."""
    ours = tl.GRU(INPUTS, INPUTS, num_layers=3, solver=Chunks(tol=2e-5))
    one = 4 * STEPS * BATCH * (2 + 4 + 1 + 4) * INPUTS  # x, gates, states and what is kept of them
    monkeypatch.setattr(replay, "_memory", lambda _: int(replay.SHARE_OF_ALL * one * room))
    monkeypatch.setattr(replay, "SHARE_OF_ONE", replay.SHARE_OF_ALL)
    for _ in range(8):
        ours(torch.randn(STEPS, BATCH, INPUTS))[0].sum().backward()


@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_a_weight_that_lies_otherwise_at_its_place(kind: str) -> None:
    """A graph would read it as it lay; its stand-in here does not."""
    ours, exact = pair(kind)
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    (known,) = ours._steady.values()
    assert known.fits(ours, x, None)
    weight = ours.weight_hh_l0
    weight.data = weight.data.as_strided(weight.shape, (1, len(weight)))
    assert not known.fits(ours, x, None)


def test_another_function_of_an_rnn_and_another_order_of_its_inputs() -> None:
    ours, exact = pair("RNN")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    for module in (ours, exact):
        module.nonlinearity, module.mode = "relu", "RNN_RELU"
    assert_right(ours, exact, x)
    for module in (ours, exact):
        module.batch_first = True
    assert_right(ours, exact, x)
