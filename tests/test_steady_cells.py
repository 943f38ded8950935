"""Calls of users' cells that are replays alone: results and gradients against plain loops in float64, and that a cell
that changed in any way is never run as it was.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import random
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import replayed_on_cpu as emulated
import surrounded_cell as around
import torch
from replayed_on_cpu import Chunks, Graph
from surrounded_cell import CHANGES, Own
from test_replayed_cells import OwnStandIn
from torch import Tensor, nn

import timeloom as tl
from timeloom import kernels, unroll
from timeloom.compile import remember
from timeloom.compile.following import look_around
from timeloom.compile.surroundings import Unseen
from timeloom.kernels import ReferenceSweeper, replay
from timeloom.kernels.mending import Unless
from timeloom.nn import layer as layers
from timeloom.nn import steady_cells
from timeloom.problem import Recurrence
from timeloom.solve import steady_cell, steady_pass
from timeloom.solvers import Shooting

STEPS, BATCH, INPUTS, UNITS = 41, 2, 3, 4
CALLS_BEFORE = 3
"""Calls until both passes are recorded."""
CELLS = {
    "LayerNormGRU": tl.cells.LayerNormGRU,
    "SLSTM": lambda inputs, units: tl.cells.SLSTM(inputs, units, heads=2),
    "BlockGRU": lambda inputs, units: tl.cells.BlockGRU(inputs, units, blocks=2),
    "CfC": tl.cells.CfC,
}


WAITING, MENDED = "waiting", "mended"
"""For certificates; or not, since graphs mend what is not certified."""


@pytest.fixture(autouse=True, params=[WAITING, MENDED])
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(kernels, "KINDS", (OwnStandIn, ReferenceSweeper))
    monkeypatch.setattr(remember, "FEWEST_STEPS", 0)
    monkeypatch.setattr(Graph, "replays", 0)
    with emulated.on_a_cpu(monkeypatch, request.param == MENDED):
        yield


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was not a replay."""
    seen: list[str] = []
    for place, name in ((layers, "run_fused"), (unroll_module(), "run_fused"), (steady_cell, "solve_summed")):
        honest = getattr(place, name)

        def spy(*given: Any, name: str = name, honest: Any = honest, **more: Any) -> Any:
            problem = next(one for one in given if isinstance(one, Recurrence))
            if problem.initial.dtype != torch.float64:  # the loops are in float64
                seen.append(name)
            return honest(*given, **more)

        monkeypatch.setattr(place, name, spy)
    return seen


def unroll_module() -> Any:
    import sys

    return sys.modules[unroll.__module__]


def pair(cell: Any, **options: Any) -> tuple[Any, Any]:
    ours = tl.Layer(cell, solver=Chunks(tol=2e-5), **options)
    exact = copy.deepcopy(ours).double()
    exact.solver = "sequential"
    return ours, exact


def results(module: Any, x: Tensor, hx: Any = None, use_final: bool = True) -> list[Tensor]:
    module.zero_grad()
    dtype = next(module.parameters()).dtype
    x = x.detach().to(dtype).requires_grad_(x.requires_grad)
    hx = None if hx is None else tuple(part.detach().to(dtype).requires_grad_() for part in hx)
    y, final = module(x, hx if hx is None or len(hx) > 1 else hx[0])
    final = final if isinstance(final, tuple) else (final,)
    loss = (y * torch.linspace(0.2, 1.0, y.numel(), dtype=dtype).view_as(y).sin()).sum()
    if use_final:
        loss = loss + sum((index + 1) * part.square().sum() for index, part in enumerate(final[:2]))
    loss.backward()
    live = [x, *(hx or ()), *module.parameters()]
    return [y.detach(), *(part.detach() for part in final), *(one.grad for one in live if one.grad is not None)]


def assert_near(found: list[Tensor], right: list[Tensor]) -> None:
    for own, truth in zip(found, right, strict=True):
        assert own.shape == truth.shape
        assert float((own.double() - truth).abs().max()) <= 5e-4 * max(1.0, float(truth.abs().max()))


def assert_right(ours: Any, exact: Any, x: Tensor, hx: Any = None, use_final: bool = True) -> None:
    assert_near(results(ours, x, hx, use_final), results(exact, x, hx, use_final))


def move(ours: Any, exact: Any) -> None:
    """A step of an optimizer, in place."""
    with torch.no_grad():
        for own, right in zip(ours.parameters(), exact.parameters(), strict=True):
            own.add_(0.02 * torch.randn_like(own))
            right.copy_(own)


OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "batch first": {"batch_first": True},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
}


@pytest.mark.parametrize(
    ("name", "options", "given"),
    [
        ("LayerNormGRU", "one layer", "nothing"), ("LayerNormGRU", "one layer", "x and hx"),
        ("SLSTM", "one layer", "x"), ("SLSTM", "batch first", "x and hx"), ("BlockGRU", "one layer", "x"),
        ("CfC", "batch first", "nothing"), ("CfC", "two layers, both ways", "x"),
    ],
)  # fmt: skip
def test_results_and_gradients_are_the_loops(name: str, options: str, given: str, solved: list[str]) -> None:
    """Inputs, initial states and weights change from call to call."""
    cell = CELLS[name](INPUTS, UNITS)
    ours, exact = pair(cell, **OPTIONS[options])
    count = len(ours.cells)
    for call in range(CALLS_BEFORE + 2):
        if call == CALLS_BEFORE:
            solved.clear()
        x = torch.randn((BATCH, STEPS, INPUTS) if ours.batch_first else (STEPS, BATCH, INPUTS))
        x.requires_grad_(given != "nothing")
        hx = tuple(0.1 * torch.randn(count, BATCH, UNITS) for _ in range(cell.parts)) if given == "x and hx" else None
        assert_right(ours, exact, x, hx)
        move(ours, exact)
    assert solved == []
    assert all(report.certified and "fused" in report.reason for report in ours.reports)
    assert all(report.backward.certified for report in ours.reports)


def test_one_part_of_the_loss(solved: list[str]) -> None:
    """Backward passes of two kinds, with and without a gradient of the final state."""
    ours, exact = pair(tl.cells.LayerNormGRU(INPUTS, UNITS))
    for call in range(CALLS_BEFORE + 6):
        if call == CALLS_BEFORE + 2:
            solved.clear()
        assert_right(ours, exact, torch.randn(STEPS, BATCH, INPUTS), use_final=call % 2 == 0)
    assert solved == []


@pytest.mark.parametrize("how", ["module", "function", "method"])
def test_unroll(how: str, solved: list[str]) -> None:
    cell = tl.cells.SLSTM(INPUTS, UNITS)
    exact = copy.deepcopy(cell).double()
    step = {"module": cell, "function": lambda state, x: cell(state, x), "method": cell.forward}[how]
    for call in range(CALLS_BEFORE + 2):
        if call == CALLS_BEFORE:
            solved.clear()
        found = []
        x, first = torch.randn(STEPS, BATCH, INPUTS), torch.rand(BATCH, UNITS)
        for own, function, solver in ((cell, step, Chunks(tol=2e-5)), (exact, exact, "sequential")):
            own.zero_grad()
            dtype = own.recurrent.dtype
            given, initial = (one.detach().to(dtype).requires_grad_() for one in (x, first))
            zeros = torch.zeros_like(initial)
            states, _ = tl.unroll(function, (initial, zeros, zeros + 1, zeros), given, solver=solver)
            (states[0].square().sum() + states[2].sum()).backward()
            weights = [weight.grad for weight in own.parameters()]
            found.append([*(part.detach() for part in states), given.grad, initial.grad, *weights])
        assert_near(*found)
        move(cell, exact)
    assert solved == []


def test_half_precision(solved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: kernels compute in float32."""
    monkeypatch.setattr(remember, "_hinders", lambda _: None)
    ours = tl.Layer(tl.cells.BlockGRU(INPUTS, UNITS, blocks=2), solver=Chunks(tol=2e-5)).bfloat16()
    exact = tl.Layer(copy.deepcopy(ours.cells[0]).double(), solver="sequential")
    for _ in range(CALLS_BEFORE + 2):
        x = torch.randn(STEPS, BATCH, INPUTS).bfloat16().requires_grad_()
        solved.clear()
        found, right = results(ours, x), results(exact, x)
        for own, truth in zip(found, right, strict=True):
            assert own.dtype == torch.bfloat16
            assert float((own.double() - truth).abs().max()) <= 2e-2 * max(1.0, float(truth.abs().max()))
    assert solved == []  # of the last call


def test_inference(solved: list[str]) -> None:
    ours, exact = pair(tl.cells.CfC(INPUTS, UNITS))
    with torch.no_grad():
        for call in range(CALLS_BEFORE + 2):
            x = torch.randn(STEPS, BATCH, INPUTS)
            if call == CALLS_BEFORE:
                solved.clear()
            assert_near([ours(x)[0]], [exact(x.double())[0]])
    assert solved == []
    with torch.inference_mode():
        assert_near([ours(x)[0]], [exact(x.double())[0]])


@pytest.fixture
def as_it_was() -> Iterator[None]:
    """Own's class and the globals of its file, put back."""
    own, held = dict(vars(Own)), dict(vars(around))
    squash = around.squash
    code, defaults = squash.__code__, squash.__defaults__
    yield
    for name in ("of_class", "scaled"):
        setattr(Own, name, own[name])
    around.GLOBAL_SCALE, around.squash = held["GLOBAL_SCALE"], squash  # type: ignore[attr-defined]
    squash.__code__, squash.__defaults__ = code, defaults
    around.other.scale = 0.5  # type: ignore[attr-defined]
    torch.nn.modules.module._global_forward_hooks.clear()


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("change", CHANGES)
def test_a_cell_that_changed_is_never_run_as_it_was(change: str, solved: list[str]) -> None:
    graded = change in ("what is differentiated", "values in place", "a parameter")
    run = results if graded else outputs
    ours = tl.Layer(Own(), solver=Chunks(tol=2e-5))
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(CALLS_BEFORE):
        run(ours, x)
    solved.clear()
    before = run(ours, x)
    assert solved == []
    CHANGES[change](ours.cells[0])
    found = run(ours, x)
    right = run(tl.Layer(copy.deepcopy(ours.cells[0]).double(), solver="sequential"), x)
    if change == "an attribute by a millionth":  # no comparison of values would show it
        assert solved
    else:
        same = len(before) == len(right) and all(
            float((one - two).abs().max()) < 1e-4 for one, two in zip(before, right, strict=True)
        )
        assert not same  # a change that changes nothing shows nothing
        assert_near(found, right)


@torch.no_grad()
def outputs(module: Any, x: Tensor) -> list[Tensor]:
    return [module(x.to(next(module.parameters()).dtype))[0]]


def test_other_attributes_may_change(solved: list[str]) -> None:
    ours = tl.Layer(Own(), solver=Chunks(tol=2e-5))
    for call in range(CALLS_BEFORE + 3):
        if call == CALLS_BEFORE:
            solved.clear()
        ours.cells[0].unused = call  # a counter of the user's, which no step reads
        outputs(ours, torch.randn(STEPS, BATCH, INPUTS))
    assert solved == []


def test_closures() -> None:
    scale, weight = 0.5, torch.randn(UNITS, UNITS) / 4

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(scale * (h @ weight) + x)

    x, first = torch.randn(STEPS, BATCH, UNITS), torch.zeros(BATCH, UNITS)

    def run(solver: Any) -> Tensor:
        with torch.no_grad():
            return tl.unroll(step, first, x, solver=solver)[0]  # type: ignore[return-value]

    for _ in range(CALLS_BEFORE):
        run(Chunks(tol=2e-5))
    replays = Graph.replays
    run(Chunks(tol=2e-5))
    assert Graph.replays == replays + 1
    scale = 0.8
    assert_near([run(Chunks(tol=2e-5))], [run("sequential")])
    weight = torch.randn(UNITS, UNITS) / 4
    assert_near([run(Chunks(tol=2e-5))], [run("sequential")])


def test_a_function_that_wraps_another_is_its_own() -> None:
    cell = tl.cells.CfC(UNITS, UNITS)
    x, first = torch.randn(STEPS, BATCH, UNITS), torch.zeros(BATCH, UNITS)

    def step(h: Tensor, x: Tensor) -> Tensor:
        return cell(h, x)  # type: ignore[no-any-return]

    def run(function: Any, solver: Any) -> Tensor:
        with torch.no_grad():
            return tl.unroll(function, first, x, solver=solver)[0]  # type: ignore[return-value]

    for _ in range(CALLS_BEFORE):
        run(step, Chunks(tol=2e-5))

    @functools.wraps(step)
    def halved(h: Tensor, x: Tensor) -> Tensor:
        return 0.5 * step(h, x)

    for _ in range(2):
        assert_near([run(halved, Chunks(tol=2e-5))], [run(halved, "sequential")])
        assert_near([run(step, Chunks(tol=2e-5))], [run(step, "sequential")])


def test_what_a_decorator_of_torchs_holds() -> None:
    """It is followed, though torch's own code is not."""
    scale = 0.5

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(scale * h + x)

    around = look_around(_decorated_by_torch(step), torch.device("cpu"), lambda: None)
    assert around.same()
    scale = 0.8
    assert not around.same()


def _decorated_by_torch(step: Any) -> Any:
    def decorated(h: Tensor, x: Tensor) -> Any:
        return step(h, x)

    return types.FunctionType(decorated.__code__, vars(torch.nn.functional), closure=decorated.__closure__)


def test_another_cell_in_its_place() -> None:
    ours = tl.Layer(Own(), solver=Chunks(tol=2e-5))
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(CALLS_BEFORE):
        outputs(ours, x)
    ours.cells[0] = Own()
    exact = tl.Layer(copy.deepcopy(ours.cells[0]).double(), solver="sequential")
    assert_near(outputs(ours, x), outputs(exact, x))


def test_a_step_that_is_refused_is_not_replayed(solved: list[str]) -> None:
    ours = tl.Layer(Own(), solver=Chunks(tol=2e-5))
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(CALLS_BEFORE):
        outputs(ours, x)
    remember.refuse(ours.cells[0], "it is another one now")
    steady_cells.LOOK_AFTER, before = 1, steady_cells.LOOK_AFTER
    outputs(ours, x)
    steady_cells.LOOK_AFTER = before
    solved.clear()
    outputs(ours, x)
    assert solved == ["run_fused"]
    assert "other values" in ours._known.reasons[0]


COUNTER = {"calls": 0}


def _item(h: Tensor, x: Tensor) -> Tensor:
    return h * float(BUFFER) + x


def _drawn(h: Tensor, x: Tensor) -> Tensor:
    return random.random() * h + x


def _hidden(h: Tensor, x: Tensor) -> Tensor:
    return getattr(COUNTER, "get")("calls") * h + x  # noqa: B009


def _imported(h: Tensor, x: Tensor) -> Tensor:
    import math

    return math.pi * h + x


BUFFER = torch.tensor(0.5)


class Counting(nn.Module):
    count = 0

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        self.count += 1
        return torch.tanh(h + x)


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(UNITS))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h * next(self.parameters()) + x)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (_item, "number is read"), (_drawn, "random"), (_hidden, "getattr"), (_imported, "imports"),
        (Counting(), "sets .count"), (Listing(), "parameters"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_told(step: Any, reason: str) -> None:
    rows = torch.zeros(2, UNITS)
    with pytest.raises(Unseen, match=reason):
        look_around(step, torch.device("cpu"), lambda: step(rows, rows))


def test_check_cell_tells_it() -> None:
    rows = torch.randn(3, UNITS)
    assert "getattr" in tl.check_cell(lambda h, x: torch.tanh(h + getattr(x, "data")), rows, rows).unseen  # noqa: B009
    assert tl.check_cell(lambda h, x: torch.tanh(h + x), rows, rows).unseen == ""


def test_recordings_of_what_changed_are_dropped() -> None:
    ours = tl.Layer(tl.cells.CfC(INPUTS, UNITS), solver=Chunks(tol=2e-5))
    for _ in range(CALLS_BEFORE):
        results(ours, torch.randn(STEPS, BATCH, INPUTS))
    (kind,) = ours._known._kinds.values()
    forward = kind.cells[0].forward
    assert forward.stands()
    ours.cells[0].register_forward_hook(lambda *_: None)
    for _ in range(steady_cells.CALLS_BEFORE):
        results(ours, torch.randn(STEPS, BATCH, INPUTS))
    assert not forward.recording.here
    assert forward.wanted == []


def test_weights_put_in_for_one_call(solved: list[str]) -> None:
    """Whoever comes back finds the recordings."""
    ours, exact = pair(tl.cells.CfC(INPUTS, UNITS))
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(CALLS_BEFORE):
        assert_right(ours, exact, x)
    others = {name: 0.5 * weight.detach() for name, weight in ours.named_parameters()}
    found = torch.func.functional_call(ours, others, (x,))[0]
    wide = {name: weight.double() for name, weight in others.items()}
    assert_near([found.detach()], [torch.func.functional_call(exact, wide, (x.double(),))[0].detach()])
    solved.clear()
    assert_right(ours, exact, x)
    assert solved == []


def test_short_sequences_are_compiled_late(solved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "FEWEST_STEPS", 5 * STEPS)
    ours = tl.Layer(tl.cells.CfC(INPUTS, UNITS), solver=Chunks(tol=2e-5))
    for _ in range(12):
        outputs(ours, torch.randn(STEPS, BATCH, INPUTS))
    solved.clear()
    outputs(ours, torch.randn(STEPS, BATCH, INPUTS))
    assert solved == []


def test_a_cell_that_cannot_be_followed_runs_as_ever(solved: list[str]) -> None:
    ours = tl.Layer(tl.cells.CfC(INPUTS, UNITS), solver=Chunks(tol=2e-5))
    ours.cells[0].register_forward_hook(lambda *_: None)
    for _ in range(CALLS_BEFORE):
        results(ours, torch.randn(STEPS, BATCH, INPUTS))
    assert solved.count("run_fused") == CALLS_BEFORE
    assert any("hooks" in reason for reason in ours._known.reasons)


@pytest.mark.parametrize("_on_a_cpu", [WAITING], indirect=True)
def test_a_missed_certificate_is_solved_anew(solved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, exact = pair(tl.cells.LayerNormGRU(INPUTS, UNITS))
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(CALLS_BEFORE):
        assert_right(ours, exact, x)
    solved.clear()
    honest = steady_pass.report_of
    monkeypatch.setattr(steady_pass, "report_of", lambda error, *_: honest(torch.inf, *_))
    assert_right(ours, exact, x)
    assert solved[:1] == ["run_fused"]


@pytest.mark.parametrize("_on_a_cpu", [MENDED], indirect=True)
def test_a_missed_certificate_is_mended(solved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, exact = pair(tl.cells.LayerNormGRU(INPUTS, UNITS))
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(CALLS_BEFORE + 1):
        assert_right(ours, exact, x)
    assert not ours.reports[0].fell_back
    solved.clear()
    sweeps = Graph.replays
    monkeypatch.setattr(Unless, "limit_on_device", property(lambda _: -1.0))
    monkeypatch.setattr(steady_pass, "report_of", lambda *_: None)
    assert_right(ours, exact, x)
    assert solved == []
    assert Graph.replays == sweeps + 2
    (report,) = ours.reports
    assert report.fell_back
    assert report.backward is not None
    assert report.backward.fell_back


def test_calls_between_forward_and_backward() -> None:
    ours, exact = pair(tl.cells.LayerNormGRU(INPUTS, UNITS))
    for _ in range(CALLS_BEFORE):
        assert_right(ours, exact, torch.randn(STEPS, BATCH, INPUTS))
    inputs = [torch.randn(STEPS, BATCH, INPUTS) for _ in range(3)]
    found = []
    for module in (ours, exact):
        module.zero_grad()
        dtype = next(module.parameters()).dtype
        losses = [module(x.to(dtype))[0].square().sum() for x in inputs]
        for loss in losses:
            loss.backward()
        found.append([weight.grad for weight in module.parameters()])
    assert_near(*found)


def test_weights_that_moved_before_backward_are_told() -> None:
    ours, exact = pair(tl.cells.LayerNormGRU(INPUTS, UNITS))
    for _ in range(CALLS_BEFORE):
        assert_right(ours, exact, torch.randn(STEPS, BATCH, INPUTS))
    y, _ = ours(torch.randn(STEPS, BATCH, INPUTS))
    move(ours, exact)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_of_gradients(solved: list[str]) -> None:
    ours, exact = pair(tl.cells.LayerNormGRU(INPUTS, UNITS))
    x = torch.randn(STEPS, BATCH, INPUTS).requires_grad_()
    for _ in range(CALLS_BEFORE):
        assert_right(ours, exact, x)
    solved.clear()
    found = []
    for module in (ours, exact):
        given = x.detach().to(next(module.parameters()).dtype).requires_grad_()
        (grad,) = torch.autograd.grad(module(given)[0].square().sum(), given, create_graph=True)
        module.zero_grad()
        grad.square().sum().backward()
        found.append([weight.grad for weight in module.parameters()])
    assert "run_fused" not in solved
    for own, right in zip(*found, strict=True):
        assert float((own.double() - right).abs().max()) <= 2e-3 * max(1.0, float(right.abs().max()))


def test_now_and_then_a_call_is_looked_at(solved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_cells, "LOOK_AFTER", 4)
    ours, _ = pair(tl.cells.CfC(INPUTS, UNITS))
    for _ in range(CALLS_BEFORE + 8):
        results(ours, torch.randn(STEPS, BATCH, INPUTS))
    assert 3 <= solved.count("run_fused") <= 6


def test_copies_find_their_own_way() -> None:
    ours, exact = pair(tl.cells.LayerNormGRU(INPUTS, UNITS))
    x = torch.randn(STEPS, BATCH, INPUTS)
    for _ in range(CALLS_BEFORE):
        assert_right(ours, exact, x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        move(other, exact)
        assert_right(other, exact, x)
        for own, right in zip(ours.parameters(), exact.parameters(), strict=True):
            right.data.copy_(own)
    assert_right(ours, exact, x)


def test_nothing_is_kept_of_a_module_that_is_gone() -> None:
    ours, _ = pair(tl.cells.LayerNormGRU(INPUTS, UNITS))
    cell = tl.cells.CfC(INPUTS, UNITS)
    x, first = torch.randn(STEPS, BATCH, INPUTS), torch.zeros(BATCH, UNITS)
    for _ in range(CALLS_BEFORE):
        results(ours, x)
        tl.unroll(cell, first, x, solver=Chunks(tol=2e-5))[0].sum().backward()  # type: ignore[union-attr]
    gone = [weakref.ref(one) for one in (ours, ours.cells[0].recurrent.weight, cell)]
    replay.RECORDINGS.clear()  # stand-ins of graphs hold what they record; graphs do not
    del ours, cell
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


def test_a_solver_that_cannot_be_told_from_others() -> None:
    """Its calls are solved as they come."""

    class Unhashable(Shooting):
        __hash__ = None  # type: ignore[assignment]

    ours, exact = pair(tl.cells.CfC(INPUTS, UNITS))
    ours.solver = Unhashable(tol=2e-5)
    for _ in range(CALLS_BEFORE + 1):
        assert_right(ours, exact, torch.randn(STEPS, BATCH, INPUTS))
