"""`unroll` on cells that users write, and `check_cell`, which holds them to their promises."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import timeloom as tl
from timeloom.cells import GenericCell
from timeloom.compile import remember
from timeloom.solvers import Auto, Sequential, Shooting

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH, WIDTH = 30, 3, 4
SOLVERS = (Shooting(chunk=7), Shooting(chunk=4, correction="newton"), Auto(), Sequential())


@pytest.fixture(autouse=True, params=["by themselves", "compiled"])
def cells_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels made for them, too, which cells of so few steps do not get."""
    if request.param == "compiled":
        monkeypatch.setattr(remember, "FEWEST_STEPS", 0)


def tanh_cell(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.5 * h + 0.3 * h.roll(1, -1) + x)


def plain(cell: object, h: object, xs: Tensor) -> list[object]:
    states = []
    for x in xs:
        h = cell(h, x)
        states.append(h)
    return states


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("solver", [*SOLVERS, "auto", "shooting", "sequential"], ids=str)
def test_states_are_the_plain_loops(solver: object) -> None:
    h0, xs = inputs(BATCH, WIDTH), inputs(STEPS, BATCH, WIDTH)
    states, report = tl.unroll(tanh_cell, h0, xs, solver)
    assert states.shape == (STEPS, BATCH, WIDTH)
    assert zoo.difference(states, torch.stack(plain(tanh_cell, h0, xs))) < 1e-13
    assert report.converged
    assert isinstance(report, tl.SolveReport)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_tuples_of_any_shape(solver: object) -> None:
    def cell(state: tuple[Tensor, Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = state
        return (
            torch.tanh(a + b.mean((1, 2)) + x[:, 0, 0]),
            0.5 * b + 0.1 * a[:, None, None] * x,
            torch.cos(c + a[:, None]),
        )

    h0, xs = (inputs(BATCH), inputs(BATCH, 2, 3), inputs(BATCH, 5)), inputs(STEPS, BATCH, 2, 3)
    states, _ = tl.unroll(cell, h0, xs, solver)
    assert isinstance(states, tuple)
    assert [tuple(part.shape) for part in states] == [(STEPS, BATCH), (STEPS, BATCH, 2, 3), (STEPS, BATCH, 5)]
    for part, expected in zip(states, zip(*plain(cell, h0, xs), strict=True), strict=True):
        assert zoo.difference(part, torch.stack(expected)) < 1e-12


def test_inputs_of_any_shape_and_kind() -> None:
    """Scalars a step, images a step, whole numbers that look up an embedding."""
    table = nn.Embedding(7, WIDTH, dtype=torch.float64)
    tokens = torch.randint(0, 7, (STEPS, BATCH), generator=torch.Generator().manual_seed(0))

    def lookup(h: Tensor, x: Tensor) -> Tensor:
        assert x.shape == h.shape[:1]
        assert x.dtype == torch.int64
        return torch.tanh(0.5 * h + table(x))

    states, _ = tl.unroll(lookup, torch.zeros(BATCH, WIDTH, dtype=torch.float64), tokens, Shooting(chunk=7))
    expected = torch.stack(plain(lookup, torch.zeros(BATCH, WIDTH, dtype=torch.float64), tokens))
    assert zoo.difference(states, expected) < 1e-13
    (given,), (wanted,) = (torch.autograd.grad(s.square().sum(), table.weight) for s in (states, expected))
    torch.testing.assert_close(given, wanted, rtol=1e-11, atol=1e-13)

    def scalar(h: Tensor, x: Tensor) -> Tensor:
        assert x.dim() == 1
        return torch.tanh(h + x)

    states, _ = tl.unroll(scalar, torch.zeros(BATCH).double(), inputs(STEPS, BATCH), Shooting(chunk=7))
    assert states.shape == (STEPS, BATCH)
    assert zoo.difference(states, torch.stack(plain(scalar, torch.zeros(BATCH).double(), inputs(STEPS, BATCH)))) < 1e-13


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_everything_a_cell_holds_gets_its_gradient(solver: object) -> None:
    """A closure's tensors, a module's parameters, inputs and initial state."""
    torch.manual_seed(0)
    module = nn.GRUCell(WIDTH, WIDTH, dtype=torch.float64)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    h0, xs = inputs(BATCH, WIDTH).requires_grad_(), inputs(STEPS, BATCH, WIDTH).requires_grad_()

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return module(scale * x, h)

    leaves = (h0, xs, scale, *module.parameters())
    states, _ = tl.unroll(cell, h0, xs, solver)
    given = torch.autograd.grad(states.square().sum() + states[-1].sum(), leaves)
    expected = torch.stack(plain(cell, h0, xs))
    wanted = torch.autograd.grad(expected.square().sum() + expected[-1].sum(), leaves)
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_the_report_a_caller_holds_is_completed() -> None:
    h0, xs = inputs(BATCH, WIDTH), inputs(STEPS, BATCH, WIDTH).requires_grad_()
    states, report = tl.unroll(tanh_cell, h0, xs, Shooting(chunk=7))
    assert report.backward is None
    states.sum().backward()
    assert report.backward is not None
    assert report.backward.converged
    assert report.backward.chunk == 7


@pytest.mark.parametrize("solver", ["auto", Shooting(chunk=7)], ids=str)
def test_a_cell_that_does_not_contract_is_still_exact(solver: object) -> None:
    """A rotation keeps every difference for ever; the logistic map makes it grow."""
    turn = torch.linalg.qr(inputs(WIDTH, WIDTH)).Q

    def rotation(h: Tensor, x: Tensor) -> Tensor:
        return h @ turn + x

    def logistic(h: Tensor, x: Tensor) -> Tensor:
        return 3.9 * h * (1 - h) + 0 * x

    for cell, h0, close in (
        (rotation, inputs(BATCH, WIDTH), 1e-12),
        (logistic, torch.full((BATCH, WIDTH), 0.3, dtype=torch.float64), 1e-3),
    ):
        xs = inputs(60, BATCH, WIDTH).requires_grad_()
        expected = torch.stack(plain(cell, h0, xs))
        states, report = tl.unroll(cell, h0, xs, solver)
        assert report.converged
        assert zoo.difference(states, expected) < close
        given, wanted = (torch.autograd.grad(s.sum(), xs)[0] for s in (states, expected))
        assert zoo.difference(given, wanted) < close or not bool(wanted.any())


def test_diagonal_structure_is_used_where_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long memory without a coupling: the decay is the exact transfer, and no dense Jacobian is built."""
    dense, original = [], GenericCell._dense

    def watched(self: GenericCell, state: Tensor, u: Tensor) -> Tensor:
        dense.append(len(state))
        return original(self, state, u)

    monkeypatch.setattr(GenericCell, "_dense", watched)
    monkeypatch.setattr(remember, "FEWEST_STEPS", 512)  # a normal form tells its structure without a probe

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return 0.99 * h + 0.01 * x

    h0, xs = inputs(BATCH, WIDTH), inputs(80, BATCH, WIDTH)
    states, report = tl.unroll(cell, h0, xs, Shooting(chunk=8, correction="diag"))
    assert zoo.difference(states, torch.stack(plain(cell, h0, xs))) < 1e-12
    assert report.iterations <= 3
    assert len(dense) == 1, "only the probe looks at a dense Jacobian"
    assert dense[0] <= 8


def test_a_coupling_that_the_probe_misses_only_costs_sweeps() -> None:
    """Units look at one another at large inputs alone, which the first rows do not show: results stay exact."""

    def cell(h: Tensor, x: Tensor) -> Tensor:
        mixed = torch.where(x > 1.5, h.flip(-1), h)
        return torch.tanh(0.9 * mixed + x)

    h0, xs = inputs(BATCH, WIDTH), inputs(STEPS, BATCH, WIDTH)
    xs[:6] = xs[:6].clamp(max=1)
    xs.requires_grad_()
    for correction in ("diag", "newton", "auto"):
        states, report = tl.unroll(cell, h0, xs, Shooting(chunk=2, correction=correction))
        expected = torch.stack(plain(cell, h0, xs))
        assert report.converged
        assert zoo.difference(states, expected) < 1e-12
        given, wanted = (torch.autograd.grad(s.square().sum(), xs)[0] for s in (states, expected))
        assert zoo.difference(given, wanted) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    h0, xs = inputs(BATCH, WIDTH).to(dtype), inputs(STEPS, BATCH, WIDTH).to(dtype)
    states, report = tl.unroll(tanh_cell, h0, xs, Shooting(chunk=7))
    assert states.dtype == dtype
    assert report.converged
    expected = torch.stack(plain(tanh_cell, h0.double(), xs.double()))
    assert zoo.difference(states.double(), expected) < 8 * torch.finfo(dtype).eps


def test_a_single_step_and_no_rows() -> None:
    h0, xs = inputs(BATCH, WIDTH), inputs(1, BATCH, WIDTH)
    for solver in SOLVERS:
        assert zoo.difference(tl.unroll(tanh_cell, h0, xs, solver)[0][0], tanh_cell(h0, xs[0])) < 1e-14
        states, report = tl.unroll(tanh_cell, h0[:0], inputs(5, 0, WIDTH), solver)
        assert states.shape == (5, 0, WIDTH)
        assert report.converged


def test_what_was_learned_does_not_keep_a_cell_alive() -> None:
    cell = zoo.ModuleCell(WIDTH)
    h0, xs = torch.zeros(BATCH, WIDTH), torch.randn(STEPS, BATCH, zoo.INPUTS)
    tl.unroll(cell, h0, xs)[0].sum().backward()
    watched = weakref.ref(cell)
    del cell
    gc.collect()
    assert watched() is None


class Stepper:
    """A cell that is a method."""

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        return tanh_cell(h, x)

    def other(self, h: Tensor, x: Tensor) -> Tensor:
        return tanh_cell(h, x)


def test_what_was_learned_on_a_method_is_kept_with_its_object() -> None:
    h0, xs = torch.zeros(BATCH, WIDTH), torch.randn(2000, BATCH, WIDTH)
    stepper = Stepper()
    assert "assumed" in tl.unroll(stepper.step, h0, xs)[1].reason
    assert "learned" in tl.unroll(stepper.step, h0, xs)[1].reason
    assert "assumed" in tl.unroll(stepper.other, h0, xs)[1].reason
    assert "assumed" in tl.unroll(Stepper().step, h0, xs)[1].reason
    watched = weakref.ref(stepper)
    del stepper
    gc.collect()
    assert watched() is None


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, h: Tensor, x: Tensor) -> Tensor:
        return tanh_cell(h, x)


def test_any_callable_will_do() -> None:
    h0, xs = inputs(BATCH, WIDTH), inputs(STEPS, BATCH, WIDTH)
    expected = torch.stack(plain(tanh_cell, h0, xs))
    for cell in (Unhashable(), Unhashable().__call__, lambda h, x: tanh_cell(h, x)):
        assert zoo.difference(tl.unroll(cell, h0, xs, Auto())[0], expected) < 1e-13


def test_hostile_arguments() -> None:
    h0, xs = inputs(BATCH, WIDTH), inputs(STEPS, BATCH, WIDTH)
    for arguments, kind, message in (
        ((3, h0, xs), TypeError, "cell must be a function or module"),
        ((tanh_cell, [1, 2], xs), TypeError, "h0 must be a Tensor or a tuple of Tensors, got list"),
        ((tanh_cell, (), xs), TypeError, "h0 must be"),
        ((tanh_cell, h0, [1, 2]), TypeError, r"xs must be a Tensor of shape \(T, B, ...\), got list"),
        ((tanh_cell, h0, xs[:, 0, 0]), ValueError, r"xs must have shape \(T, B, ...\)"),
        ((tanh_cell, h0, xs[:0]), ValueError, "no time steps"),
        ((tanh_cell, h0[:2], xs), ValueError, r"h0 has shape \(2, 4\), expected \(3, ...\)"),
        ((tanh_cell, h0.long(), xs), TypeError, "h0 must be floating point"),
        ((tanh_cell, (h0, h0.float()), xs), ValueError, "must agree in dtype"),
        ((tanh_cell, h0, xs.to("meta")), ValueError, "xs is on meta, h0 on cpu"),
        ((tanh_cell, h0, xs, "fast"), ValueError, "solver must be one of 'auto', 'sequential', 'shooting'"),
        ((tanh_cell, h0, xs, 3), ValueError, "solver must be one of"),
        ((tanh_cell, h0, xs, Shooting), ValueError, r"give an object of it: Shooting\(\)"),
        ((nn.GRUCell(WIDTH, WIDTH), h0, xs), TypeError, r"GRUCell takes x before h.*give lambda h, x: cell\(x, h\)"),
        ((nn.LSTMCell(WIDTH, WIDTH), (h0, h0), xs), TypeError, "LSTMCell takes x before h"),
        ((nn.GRU(WIDTH, WIDTH), h0, xs), TypeError, "GRU is a layer over all steps"),
        ((lambda h, x: h[:, :2], h0, xs), ValueError, r"returned a state of shape \[\(.*2\)\], expected"),
        ((lambda h, x: (h, h), h0, xs), TypeError, "returned tuple, expected a tensor"),
        ((lambda h, x: h[0], (h0, h0), xs), TypeError, "returned Tensor, expected a tuple of 2 tensors"),
        ((lambda h, x: None, h0, xs), TypeError, "returned NoneType"),
    ):
        with pytest.raises(kind, match=message):
            tl.unroll(*arguments)


# ---- check_cell -------------------------------------------------------------------------------------------------


def test_check_cell_passes_good_cells() -> None:
    for name in ("function", "function of tuple", "elementwise", "module"):
        net = zoo.network(name)
        x, initial = zoo.data(net, 1, 5)
        cell = net.recurrence(x, initial).cell
        report = tl.check_cell(cell.function, cell.unpack(initial), x[0])
        assert report.state_size == net.size
        assert report.diagonal is (name == "elementwise")
        assert report.gradient_error < 1e-6


def test_check_cell_on_whole_numbers_and_float32() -> None:
    table = nn.Embedding(5, WIDTH)
    report = tl.check_cell(lambda h, x: torch.tanh(h + table(x)), torch.zeros(3, WIDTH), torch.tensor([0, 2, 4]))
    assert report.diagonal
    module = zoo.ModuleCell(WIDTH)
    report = tl.check_cell(module, torch.randn(3, WIDTH), torch.randn(3, zoo.INPUTS))
    assert not report.diagonal
    assert report.gradient_error < 0.1


class Detached(torch.autograd.Function):
    """Doubles, and says its derivative is three."""

    @staticmethod
    def forward(ctx: object, h: Tensor) -> Tensor:
        return 2 * h

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 3 * grad


@pytest.mark.parametrize("kind", [tl.cells.LayerNormGRU, tl.cells.LayerNormLSTM])
def test_check_cell_takes_a_normalisation_of_a_state_of_zeros(kind: type[Any]) -> None:
    """It bends within the root of its eps, far less than a step of float32's differences."""
    torch.manual_seed(0)
    zeros = torch.zeros(3, 6)
    report = tl.check_cell(kind(4, 6), (zeros, zeros) if kind.parts == 2 else zeros, torch.randn(3, 4))
    assert report.gradient_error < 0.05


def test_check_cell_tells_each_broken_promise() -> None:
    torch.manual_seed(0)
    h, x = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    calls = []

    def counts(h: Tensor, x: Tensor) -> Tensor:
        calls.append(1)
        return h + len(calls)

    norm = nn.BatchNorm1d(WIDTH)
    for cell, kind, message in (
        (lambda h, x: h[:, :2], ValueError, r"returned a state of shape \[\(4, 2\)\], expected \[\(4, 4\)\]"),
        (lambda h, x: (h,), TypeError, "returned tuple, expected a tensor"),
        (lambda h, x: torch.tanh(h + x).double(), TypeError, "returned torch.float64 for a state of torch.float32"),
        (lambda h, x: torch.dropout(h + x, 0.5, True), ValueError, "not deterministic"),
        (counts, ValueError, "not deterministic"),
        (lambda h, x: h / 0, ValueError, "not finite"),
        (lambda h, x: norm(h + x), ValueError, "row 0 gives another result .*batch norm"),
        (lambda h, x: h - h.mean(0) + x, ValueError, "row 0 gives another result alone than in the batch"),
        (lambda h, x: torch.tanh(h.detach() + x), ValueError, "differs from finite differences"),
        (lambda h, x: Detached.apply(h) + x, ValueError, "differs from finite differences"),
    ):
        with pytest.raises(kind, match=message):
            tl.check_cell(cell, h, x)
    still = torch.zeros(2, WIDTH)
    with pytest.raises(ValueError, match="row 0 gives another result alone than in the batch"):
        tl.check_cell(lambda h, x: h - h.mean(0) + x, still, still)  # rows that are all alike hide it
    with pytest.raises(ValueError, match="row 0 gives another result alone than in the batch"):
        tl.check_cell(lambda h, x: torch.tanh(h.mean(0) + x), still[:1], still[:1])
    with pytest.raises(ValueError, match="as many rows"):
        tl.check_cell(tanh_cell, h, x[:3])


def test_check_cell_leaves_no_gradient_behind() -> None:
    module = zoo.ModuleCell(WIDTH)
    tl.check_cell(module, torch.randn(3, WIDTH), torch.randn(3, zoo.INPUTS))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_states_and_rows_of_no_numbers_are_told() -> None:
    with pytest.raises(ValueError, match="a state needs at least one number"):
        tl.unroll(lambda h, x: h, torch.zeros(2, 0), torch.zeros(5, 2, 1))
    with pytest.raises(ValueError, match="x has no rows"):
        tl.check_cell(lambda h, x: h, torch.zeros(0, 2), torch.zeros(0, 2))
