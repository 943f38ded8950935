"""What CUDA graphs ask for, shown without one: no look at numbers, no memory kept, certificates that outlast them."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom import problem
from timeloom.auto import cudnn, thresholds
from timeloom.auto.costs import Cost, RegisterCost, StepCost, cheapest, fewest_to_cut
from timeloom.kernels.cpu.layer import CPULayer
from timeloom.problem import Recurrence, cut_evenly
from timeloom.report import SolveReport
from timeloom.solve import driver as solve
from timeloom.solve import first_sweep
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_sweep, "capturing", lambda _: True)


@pytest.fixture
def graphs() -> Iterator[None]:
    from torch._dynamo import config

    torch.compiler.reset()
    with config.patch(allow_rnn=True):
        yield
    torch.compiler.reset()


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("name", ["GRU", "LSTM", "RNN"])
def test_what_needs_a_loop_is_one_chunk_of_a_graph(name: str) -> None:
    """Without a warm-up the first sweep is never the last one, and a graph cannot hold the loop behind it."""
    torch.manual_seed(0)
    theirs = getattr(nn, name)(3, 5).double()
    ours = getattr(tl, name)(3, 5, solver=Shooting(chunk=4, warmup=0))
    ours.load_state_dict(theirs.state_dict())
    x, found = torch.randn(33, 2, 3, dtype=torch.float64), []
    for layer, given in ((theirs, x), (ours, x.float())):
        given = given.clone().requires_grad_()
        output, final = layer(given)
        final = final if isinstance(final, tuple) else (final,)
        (output.square().sum() + sum(part.sin().sum() for part in final)).backward()
        found.append([output, *final, given.grad, *(parameter.grad for parameter in layer.parameters())])
    for exact, ours_found in zip(*found, strict=True):
        torch.testing.assert_close(ours_found.double(), exact, rtol=1e-5, atol=1e-5)
    for report in (ours.reports[0], ours.reports[0].backward):
        assert report.chunk == 33
        assert "a CUDA graph was captured" in report.reason


@pytest.mark.usefixtures("capturing")
def test_what_is_not_known_yet_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "capturing", lambda _: True)
    for name in ("forward", "backward"):
        honest = getattr(CPULayer, name)

        def on_device(*given: Any, honest: Any = honest, **more: Any) -> Any:
            result, jump = honest(*given, **more)
            return result, torch.tensor(jump)

        monkeypatch.setattr(CPULayer, name, on_device)
    layer = tl.GRU(3, 5, solver=Shooting(chunk=4, warmup=33, on_divergence="raise"))
    layer(torch.randn(33, 2, 3))[0].sum().backward()
    report = layer.reports[0]
    assert report.backward is not None
    assert report.certificate is not None
    assert report.backward.certificate is not None
    assert report.certified


@pytest.mark.parametrize(("backwards", "copies"), [(False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize(("steps", "batch", "chunk"), [(13, 3, 4), (8, 1, 4), (5, 2, 9), (1, 2, 1)])
def test_stretches_are_made_anew_where_nothing_may_be_kept(
    steps: int, batch: int, chunk: int, backwards: bool, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_evenly.cache_clear()
    segments, here = cut_evenly(steps, batch, chunk, backwards, copies), torch.device("cpu")
    lengths, once = torch.full((batch,), steps), cut_evenly(steps, batch, chunk, backwards)
    assert [row for row in zip(*map(Tensor.tolist, once.columns), strict=True) for _ in range(copies)] == list(
        zip(*map(Tensor.tolist, segments.columns), strict=True)
    )
    monkeypatch.setattr(problem, "_keeps", lambda _: False)
    for found, expected in zip(segments.on(here), segments.columns, strict=True):
        assert torch.equal(found, expected)
        assert found.data_ptr() != expected.data_ptr(), "a copy of memory, which no graph can hold"
    assert not segments._copies
    recurrence = Recurrence(tl.GRU(2, 3)._bare(*tl.GRU(2, 3)._weights_of(0)), torch.zeros(steps, batch, 9), lengths)
    one, other = recurrence.ends_on_device(), recurrence.ends_on_device()
    assert torch.equal(one, lengths)
    assert one.data_ptr() != other.data_ptr()
    monkeypatch.setattr(problem, "_keeps", lambda _: True)
    assert segments.on(here)[0] is segments.on(here)[0]
    assert recurrence.ends_on_device() is recurrence.ends_on_device()


def test_stretches_that_a_graph_reads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the memory that was there when it was captured, whatever has been cut since."""
    cut_evenly.cache_clear()
    here, captured = torch.device("cpu"), {True: 13, False: 14}
    monkeypatch.setattr(problem, "_captured", {})
    columns = {}
    for captures, steps in captured.items():
        monkeypatch.setattr(problem, "capturing", lambda _: False)
        monkeypatch.setattr(Tensor, "to", lambda column, _: column.clone())  # as to another device
        cut_evenly(steps, 2, 4, False).on(here)
        monkeypatch.setattr(problem, "capturing", lambda _, captures=captures: captures)
        columns[captures] = [weakref.ref(column) for column in cut_evenly(steps, 2, 4, False).on(here)]
    for steps in range(20, 20 + 2 * cut_evenly.cache_parameters()["maxsize"]):
        cut_evenly(steps, 2, 4, False)
    gc.collect()
    assert all(column() is not None for column in columns[True])
    assert all(column() is None for column in columns[False])


@pytest.mark.usefixtures("graphs")
def test_certificates_outlast_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from timeloom.nn.graphs import operators  # not above: with it comes Triton, which other tests must set up first

    layer = tl.GRU(3, 5, 2, solver=Shooting(chunk=4))
    torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.randn(20, 2, 3))[0].sum().backward()
    room = torch.full((2, 2), torch.nan)
    monkeypatch.setitem(operators._certificates, layer, room)
    for backward in (False, True):
        captured = replace(layer.reports[1], certificate=torch.tensor(0.5 + backward), backward=None)
        report = operators._lasting(layer, 1, captured, backward)
        assert report.certificate is not None
        assert report.certificate.data_ptr() == room[int(backward), 1].data_ptr()
    assert room[:, 1].tolist() == [0.5, 1.5]
    assert room[:, 0].isnan().all()


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("what", ["float64", "resets of a wide layer"])
def test_what_no_cuda_graph_can_hold_says_so(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of whole layers run neither on a CPU."""
    from timeloom.nn.graphs import operators

    wide = what != "float64"
    layer, x = tl.GRU(3, 150 if wide else 5, solver=Shooting(chunk=4)), torch.randn(20, 2, 3)
    layer, x = (layer, x) if wide else (layer.double(), x.double())
    more = {"resets": torch.zeros(20, 2, dtype=torch.bool)} if wide else {}
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x, **more)
    monkeypatch.setattr(operators, "capturing", lambda _: True)
    with pytest.raises(RuntimeError, match="a CUDA graph cannot hold this solve"):
        compiled(x, **more)


def test_who_runs_is_a_few_comparisons_of_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for all lengths hold symbols for sizes: an answer by a search would make a graph for each length."""
    looked: list[Any] = []

    class Length(int):
        def __lt__(self, other: Any) -> bool:
            looked.append(other)
            return int(self) < other

        def __gt__(self, other: Any) -> bool:
            looked.append(other)
            return int(self) > other

        __hash__ = None  # type: ignore[assignment]  # as a symbol has none

    monkeypatch.setattr(cudnn, "fits", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    data: Any = SimpleNamespace(device=torch.device("cuda", 7), dtype=torch.float32)
    assert thresholds.why_faster_by_size(tl.GRU(4, 1024), data, Length(16384), 4) is None
    assert len(looked) == 3
    assert all(type(bound) is int for bound in looked)


@pytest.mark.parametrize(
    "cost",
    [
        RegisterCost(1.0, 32, 132, True),
        RegisterCost(1.0, 256, 29, False, 4),
        RegisterCost(1.0, 1024, 0, False, 0),
        StepCost(25.0),
        StepCost(400.0),
    ],
)
@pytest.mark.parametrize("batch", [1, 16, 512, 9000])
def test_the_fewest_steps_to_cut(batch: int, cost: Cost) -> None:
    fewest = fewest_to_cut(batch, 32, cost)
    lengths = [2**power for power in range(21)]
    cut = [cheapest(steps, batch, 32, cost)[0] < steps for steps in lengths]
    assert cut == [fewest is not None and steps >= fewest for steps in lengths]


def test_a_report_tells_what_a_replay_found() -> None:
    report = SolveReport("shooting[none]", 8, 1, (math.nan,), 1e-4, False, False, None, 0.0)
    assert not report.certified
    number = torch.tensor(5e-5)
    captured = replace(report, certificate=number)
    assert captured.certified
    assert "not read yet" in str(captured)
    both = replace(captured, backward=replace(report, certificate=2 * number))
    assert both.certified
    number.mul_(4)  # a later replay
    assert not captured.certified
    assert not replace(both, certificate=torch.tensor(0.0), backward=captured).certified
    assert SolveReport.sequential(8, "").certified
