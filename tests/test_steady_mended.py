"""Replays whose graphs mend what is not certified: nobody waits, results are exact, and what was missed is learned."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import replayed_on_cpu as emulated
import torch
from test_steady import BATCH, CALLS_BEFORE, INPUTS, STEPS, UNITS, assert_right, each_kind, pair, results, settle
from torch import Tensor

from timeloom.kernels import AdjointData, mending
from timeloom.kernels.host_certificate import Certificate
from timeloom.kernels.mending import Unless
from timeloom.solve import trunk


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with emulated.on_a_cpu(monkeypatch, mended=True):
        yield


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Certificate]:
    """The certificates that were waited for."""
    seen: list[Certificate] = []
    honest = Certificate.read

    def spy(self: Certificate) -> list[float] | None:
        seen.append(self)
        return honest(self)

    monkeypatch.setattr(Certificate, "read", spy)
    return seen


def steady_layer(module: Any) -> Any:
    (found,) = module._steady.values()
    return found.layers[0]


def move(ours: Any, exact: Any) -> None:
    """Have the network remember for longer than was learned."""
    with torch.no_grad():
        for module in (ours, exact):
            module.bias_hh_l0[UNITS : 2 * UNITS] += 0.9


def spy_on_misses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the certificates that launches look at are missed, in the order of the launches."""
    seen: list[bool] = []
    honest = emulated._missed
    monkeypatch.setattr(emulated, "_missed", lambda unless: (seen.append(found := honest(unless)), found)[1])
    return seen


def test_nobody_waits_for_a_certificate(reads: list[Certificate]) -> None:
    """It is read before the next replay, or when somebody asks."""
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    assert ours.reports
    reads.clear()
    results(ours, x)
    assert reads == []
    results(ours, x)
    assert len(reads) == 2, "of both passes of the call before"
    report = ours.reports[0]
    assert len(reads) == 4
    assert report.certified
    assert report.backward.residuals[0] <= report.backward.tolerance
    assert report.seconds >= 0.0
    assert ours.reports[0] is report
    assert len(reads) == 4


def test_a_report_that_somebody_holds_gets_that_of_the_backward_pass() -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    y, _ = ours(x)
    report = ours.reports[0]
    assert report.backward is None
    y.sum().backward()
    assert report.backward is not None


@each_kind
def test_what_is_missed_is_exact_and_learned(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all that is in a recording is not enough any more."""
    ours, exact = pair(kind)
    x = torch.randn(5 * STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    seen: list[str] = []
    honest = trunk.LayerSolve._forward
    monkeypatch.setattr(trunk.LayerSolve, "_forward", lambda *given: (seen.append("forward"), honest(*given))[1])
    layer = steady_layer(ours)
    strict = replace(layer.forward.standing.plan, tolerance=-1.0)
    layer.forward = replace(layer.forward, standing=layer.forward.standing._replace(plan=strict))
    assert_right(ours, exact, x)
    assert not seen, "the replay was enough"
    report = ours.reports[0]
    assert report.fell_back
    assert report.converged
    assert report.certified
    assert "were not enough this time" in report.reason
    assert layer.forward.experience.missed is not None
    assert_right(ours, exact, x)
    assert seen, "another plan follows"
    assert not ours.reports[0].fell_back


def test_a_network_that_remembers_for_longer(reads: list[Certificate]) -> None:
    ours, exact = pair("GRU")
    x = torch.randn(5 * STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    move(ours, exact)
    assert_right(ours, exact, x)
    forward, backward = ours.reports[0], ours.reports[0].backward
    assert forward.fell_back
    assert backward.fell_back
    assert forward.residuals[0] > forward.tolerance
    for _ in range(2 * CALLS_BEFORE):
        assert_right(ours, exact, x)
    assert ours._steady
    assert ours.reports[0].warmup > emulated.WARMUP
    assert not ours.reports[0].fell_back


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all that planned sweeps write wrong from now on; those of retries, whose warm-up is longer, are right."""
    forward, adjoint = emulated.StandIn.forward_entering, emulated.StandIn.adjoint_entering

    def wrong(lead: int, written: Sequence[Tensor | None]) -> None:
        for tensor in written:
            if tensor is not None and lead == emulated.WARMUP:
                tensor.add_(1.0)

    def spoilt_forward(self: Any, segments: Any, lead: int, states: list[Tensor], want_decay: bool) -> Any:
        found = forward(self, segments, lead, states, want_decay)
        wrong(lead, [*found, *states])
        return found

    def spoilt_adjoint(self: Any, segments: Any, lead: int, final: Any, data: AdjointData, want_decay: bool) -> Any:
        found = adjoint(self, segments, lead, final, data, want_decay)
        wrong(lead, [*found, data.gate_grads, data.reset_grads])
        return found

    monkeypatch.setattr(emulated.StandIn, "forward_entering", spoilt_forward)
    monkeypatch.setattr(emulated.StandIn, "adjoint_entering", spoilt_adjoint)


@pytest.mark.parametrize(("longer", "limits"), [(0, [-1.0]), (16, [-1.0, -1.0, 1e-3])], ids=["one chunk", "a retry"])
def test_gradients_that_are_missed(longer: int, limits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """With resets, too, into which gradients flow. `limits`: what is asked of the certificates of a pass, in turns."""
    ours, _ = pair("GRU")
    ours.solver = emulated.Chunks(tol=2e-5, longer=longer)
    x, resets = torch.randn(5 * STEPS, BATCH, INPUTS), torch.rand(5 * STEPS, BATCH) < 0.01
    hx = torch.randn(1, BATCH, UNITS)

    def gradients() -> list[Tensor]:
        ours.zero_grad()
        start = hx.clone().requires_grad_()
        y, _ = ours(x, start, resets=resets)
        y.sin().sum().backward()
        return [start.grad, *(weight.grad.clone() for weight in ours.parameters())]

    right = gradients()
    for _ in range(CALLS_BEFORE):
        gradients()
    assert ours._steady
    asked, missed = itertools.cycle(limits), spy_on_misses(monkeypatch)
    monkeypatch.setattr(Unless, "limit_on_device", property(lambda _: next(asked)))
    spoil(monkeypatch)
    found = gradients()
    assert missed == ([True, False] if longer else [True]) * 2, "of each pass"
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_copies_do_not_share_what_is_to_be_told() -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    results(ours, x)
    twin = copy.deepcopy(ours)
    assert twin.reports[0].certified
    assert ours.reports[0].certified


def test_a_recording_that_is_dropped_has_told_all() -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    results(ours, x)
    emulated.replay.RECORDINGS.clear()
    assert ours.reports[0].certified
    assert ours.reports[0].backward is not None


def test_a_graph_of_a_users_is_certified_where_it_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its certificate is zero then, as that of one chunk is."""
    monkeypatch.setattr(mending, "in_a_graph", lambda _: True)
    ours, exact = pair("GRU")
    x = torch.randn(5 * STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    layer, plan = steady_layer(ours)._layer, steady_layer(ours).forward.standing.plan
    layer = layer.over(x, x.new_zeros(BATCH, UNITS), [])
    for limit, met in ((plan.tolerance, True), (0.0, False)):
        with torch.no_grad():
            kept, error = layer.forward(replace(plan, tolerance=limit, accepts=limit), 0.5, True)
            right, _ = layer.forward(replace(plan, chunk=len(x), warmup=0), 0.5, True)
        assert (float(error) > 0.0) == met
        torch.testing.assert_close(kept[0], right[0], rtol=0, atol=2e-5 if met else 0)
    missed = replace(plan, tolerance=-1.0, accepts=-1.0, retry=replace(plan, warmup=2 * plan.warmup))
    for has_missed in (False, True):
        with torch.no_grad():
            kept, error = layer.forward(replace(missed, has_missed=has_missed), 0.5, True)
        assert (0.0 < float(error) <= plan.tolerance) == has_missed, "that of the longer warm-up, or of one chunk"
        torch.testing.assert_close(kept[0], right[0], rtol=0, atol=2e-5 if has_missed else 0)


@pytest.mark.parametrize("limit", [1e-6, 0.1, 1 / 3, 2.5e-7])
def test_what_the_device_takes_for_met_is_met(limit: float) -> None:
    on_device = Unless(torch.zeros(()), limit, 1).limit_on_device
    assert on_device <= limit
    assert math.isclose(on_device, limit, rel_tol=2e-7)


def test_a_users_default_device_and_dtype_are_not_asked() -> None:
    """Either would be read from the GPU while it is captured, or be above the limit."""
    told = Unless(torch.zeros(()), 0.1, 1)
    with torch.device("meta"):
        assert told.limit_on_device == Unless(torch.zeros(()), 0.1, 1).limit_on_device
    torch.set_default_dtype(torch.float64)
    try:
        assert Unless(torch.zeros(()), 0.1, 1).limit_on_device <= 0.1
    finally:
        torch.set_default_dtype(torch.float32)


def test_layers_are_recorded_under_a_default_device() -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    pull = torch.randn(STEPS, BATCH, UNITS)
    with torch.device("meta"):
        for _ in range(CALLS_BEFORE):
            ours(x)[0].backward(pull)
    assert ours._steady
    assert_right(ours, exact, x)


def test_who_interrupts_a_look_finds_it_still_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    y, _ = ours(x)

    def interrupted(self: Certificate) -> list[float] | None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Certificate, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours.reports  # noqa: B018
    (report,) = ours.reports
    assert report.certified
    y.sum().backward()
    assert report.backward is not None


def test_a_miss_of_another_call_is_not_compared_with_this_ones() -> None:
    """Jumps of two calls, which a longer warm-up has not made smaller, tell nothing of rounding."""
    ours, exact = pair("GRU")
    x = torch.randn(STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    layer = steady_layer(ours)
    experience, plan = layer.forward.experience, layer.forward.standing.plan
    experience.note_miss(plan, 2e-6, over=True)
    experience.note_miss(replace(plan, warmup=2 * plan.warmup), 3e-6)
    assert experience.rounding.largest == 0.0
    experience.note_miss(replace(plan, warmup=4 * plan.warmup), 3.5e-6)
    assert experience.rounding.largest > 0.0, "of one call they do"


def test_reports_may_be_set() -> None:
    ours, _ = pair("GRU")
    ours.reports = []
    assert ours.reports == []


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_a_longer_warm_up_is_tried_before_one_chunk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is enough, results are exact, and it is learned."""
    ours, exact = pair(kind)
    ours.solver = emulated.Chunks(tol=2e-5, longer=16)
    x = torch.randn(40 * STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    missed = spy_on_misses(monkeypatch)
    assert_right(ours, exact, x)
    assert missed == [False, False] * 2, "of each pass: a longer warm-up, and one chunk"
    missed.clear()
    move(ours, exact)
    assert_right(ours, exact, x)
    assert missed == [True, False] * 2
    experience = steady_layer(ours).forward.experience
    for report in (ours.reports[0], ours.reports[0].backward):
        assert report.certified
        assert not report.fell_back
        assert report.warmup == 16 * emulated.WARMUP
        assert report.reason == "auto: a longer warm-up"
    assert experience.search.too_short >= emulated.WARMUP
    assert experience.search.enough == 0, "a warm-up of 16 times as many steps is not what comes next"
    for _ in range(2 * CALLS_BEFORE):
        assert_right(ours, exact, x)
    assert emulated.WARMUP < ours.reports[0].warmup < 16 * emulated.WARMUP
    assert not ours.reports[0].fell_back


def test_a_longer_warm_up_that_is_not_enough_either(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, exact = pair("GRU")
    ours.solver = emulated.Chunks(tol=2e-5, longer=2)
    x = torch.randn(40 * STEPS, BATCH, INPUTS)
    settle(ours, exact, x)
    with torch.no_grad():
        for module in (ours, exact):
            module.bias_hh_l0[UNITS : 2 * UNITS] += 4
    assert_right(ours, exact, x)
    report = ours.reports[0]
    assert report.fell_back
    assert report.backward.fell_back
    assert steady_layer(ours).forward.experience.search.too_short == 2 * emulated.WARMUP
