"""The compiler of steps: random cells, refusals in words, and what makes it look again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cells import RandomCell
from torch import Tensor, nn
from torch.nn import functional as F

import timeloom as tl
from timeloom.cells.fused import FusedCell
from timeloom.compile import lanes, remember
from timeloom.compile.fuse import compile_step
from timeloom.compile.refusal import NotFused
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.fused import FusedSweeper
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence, cut, empty_states

pytestmark = pytest.mark.usefixtures("one_thread", "at_once")
needs_kernels = pytest.mark.skipif(build.unavailable() is not None, reason=f"no C kernels: {build.unavailable()}")

Gate = Callable[[Tensor], Tensor]
HARD: dict[str, tuple[Gate, Gate]] = {
    "hardsigmoid": (F.hardsigmoid, lambda a: (a / 6 + 0.5).clamp(0, 1)),
    "hardswish": (F.hardswish, lambda a: a * (a / 6 + 0.5).clamp(0, 1)),
}
"""Gates with corners, and their definitions."""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "FEWEST_STEPS", 0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def problem_of(cell: RandomCell, steps: int, batch: int, folds: bool = False) -> Recurrence:
    state = tuple(draw(batch, width) for width in cell.widths)
    xs = draw(steps, batch, cell.inputs)
    compiled = compile_step(cell, state, len(state) > 1, xs.flatten(0, 1), folds)
    with torch.no_grad():
        weights, u = compiled.prepare(cell, xs.flatten(0, 1), xs)
    return Recurrence(FusedCell(compiled.fused, weights), u.view(steps, batch, -1), torch.cat(state, -1))


@pytest.mark.parametrize("folds", [False, True], ids=["hoisted", "folded"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_the_normal_form_of_a_random_cell_is_the_cell(folds: bool, seed: int) -> None:
    cell = RandomCell(seed).double()
    is_tuple = len(cell.widths) > 1
    state = tuple(draw(9, width).requires_grad_() for width in cell.widths)
    x = draw(9, cell.inputs).requires_grad_()
    compiled = compile_step(cell, tuple(part.detach() for part in state), is_tuple, x.detach(), folds)
    weights, u = compiled.prepare(cell, x, x)
    fused = FusedCell(compiled.fused, weights)
    flat = torch.cat(state, -1)
    expected = cell(state if is_tuple else state[0], x)
    expected = torch.cat(expected, -1) if is_tuple else expected
    assert torch.allclose(fused.step(flat, u), expected, rtol=1e-9, atol=1e-10)
    probe = draw(9, fused.size)
    leaves = [*state, x, *cell.weights]
    wanted = torch.autograd.grad(expected, leaves, probe, allow_unused=True)
    with torch.no_grad():
        back, gates = fused.vjp(flat, u, probe)
        by_weight = fused.weight_grads(list(flat.split(fused.parts, -1)), gates)
    outputs = [(u, fused.input_grads(gates)), *zip(weights, by_weight, strict=True)]
    outputs = [(value, grad) for value, grad in outputs if value.requires_grad]
    through = [None] * (1 + len(cell.weights))
    if outputs:
        values, grads = zip(*outputs, strict=True)
        through = torch.autograd.grad(values, [x, *cell.weights], grads, allow_unused=True)
    found = [*back.split(fused.parts, -1), *through]
    for leaf, grad, truth in zip(leaves, found, wanted, strict=True):
        grad, truth = (torch.zeros_like(leaf) if g is None else g for g in (grad, truth))
        assert float((grad - truth).abs().max()) <= 1e-8 * (1 + float(truth.abs().max()))


@needs_kernels
@pytest.mark.parametrize("seed", [1, 5, 11, 23, 42])
@pytest.mark.parametrize("folds", [False, True], ids=["hoisted", "folded"])
def test_kernels_of_a_random_cell_are_the_reference(seed: int, folds: bool) -> None:
    assert_kernels_are_the_reference(problem_of(RandomCell(seed).double(), 13, 3, folds))


@needs_kernels
def test_units_that_keep_nothing_beside_others_that_do() -> None:
    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.cat([0.5 * h[:, :2] + x[:, :2], torch.tanh(x[:, 2:])], -1)

    state, xs = draw(3, 5), draw(13, 3, 5)
    compiled = compile_step(step, (state,), False, xs.flatten(0, 1))
    weights, u = compiled.prepare(step, xs.flatten(0, 1), xs)
    assert_kernels_are_the_reference(Recurrence(FusedCell(compiled.fused, weights), u.view(13, 3, -1), state))


def assert_kernels_are_the_reference(problem: Recurrence) -> None:
    """Of 13 steps and 3 sequences, forward and back, with what chunks keep of where they began."""
    lengths, resets = torch.tensor([13, 5, 9]), torch.rand(13, 3, generator=torch.Generator().manual_seed(1)) < 0.2
    problem = Recurrence(problem.cell, problem.u, problem.initial, lengths, resets)
    assert FusedSweeper.supports(problem)
    found = []
    for kind in (ReferenceSweeper, FusedSweeper):
        sweeper = kind(problem)
        states = empty_states(13, problem.initial, problem.cell.parts, zeroed=True)
        entered = sweeper.forward_entering(cut(problem, 4), 3, states, True)
        rows = cut(problem, 4, backwards=True)
        gates = torch.zeros(13, 3, problem.cell.gate_width, dtype=torch.float64)
        into_resets = torch.empty(len(rows), problem.cell.size, dtype=torch.float64)
        data = AdjointData(states, draw(13, 3, problem.cell.size), gates, into_resets)
        back = sweeper.adjoint_entering(rows, 2, draw(3, problem.cell.size), data, True)
        found.append([*entered, *states, *back, gates, into_resets])
    for truth, given_value in zip(*found, strict=True):
        assert torch.allclose(given_value, truth, rtol=1e-9, atol=1e-9)


@needs_kernels
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_hard_gates_are_those_of_their_definition(name: str, dtype: torch.dtype) -> None:
    """Torch's own gradient of hardsigmoid is good to float32 alone, in float64 too: there kernels and step differ, and
    the step runs as it is.
    """
    function, plain = HARD[name]
    differs = name == "hardsigmoid" and dtype == torch.float64
    weight, probe = 0.2 * draw(6, 6), draw(300, 3, 6)
    xs = 3 * draw(300, 3, 6)
    assert bool((xs.abs() > 3).any())
    found = []
    for gate, kind in ((plain, torch.float64), (function, dtype)):
        w, x = (value.to(kind).requires_grad_() for value in (weight, xs))
        ys, report = tl.unroll(
            lambda h, x, w=w, gate=gate: gate(h @ w.t() + x) * torch.tanh(x), x.new_zeros(3, 6), x,
            solver=tl.solvers.Shooting(chunk=50),
        )  # fmt: skip
        assert ("not fused" in str(report)) == (differs and gate is function)
        found.append([ys.detach(), *torch.autograd.grad(ys, [w, x], probe.to(kind))])
    for truth, value in zip(*found, strict=True):
        close = 1e-5 if dtype == torch.float32 else 1e-6 if differs else 1e-12
        assert float((value.double() - truth).abs().max()) <= close * float(truth.abs().max())


def noisy(h: Tensor, x: Tensor) -> Tensor:
    return F.dropout(h, 0.5) + x


def writes(h: Tensor, x: Tensor) -> Tensor:
    h.mul_(0.5)
    return h + x


def branches(h: Tensor, x: Tensor) -> Tensor:
    return h + x if bool(h.sum() > 0) else h - x


def shapes(h: Tensor, x: Tensor) -> Tensor:
    return h[h[:, 0] > 0].sum(0) + x


def mixes(h: Tensor, x: Tensor) -> Tensor:
    return h - h.mean(0) + x


def turned(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h.flip(0) + x)


def attends(h: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(h.unsqueeze(2), h.unsqueeze(1)).sum(-1) + x


def sorts(h: Tensor, x: Tensor) -> Tensor:
    return h.sort(-1).values + x


def stops(h: Tensor, x: Tensor) -> Tensor:
    return 0.5 * h.detach() + x


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return (value > 0).to(value.dtype)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def spikes(h: Tensor, x: Tensor) -> Tensor:
    return 0.5 * h + Spike.apply(h) + x


def hides(h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        middle = x.mean(-1, keepdim=True)
    return 0.5 * h + x - middle


def reads_data(h: Tensor, x: Tensor) -> Tensor:
    return 0.5 * h + x.data


def clips(h: Tensor, x: Tensor) -> Tensor:
    y = 0.5 * h + x
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-9, 9))
    return y


def clips_by_node(h: Tensor, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda into, out: (2 * into[0],))
    return 0.5 * h + y


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (noisy, "random"),
        (writes, "in-place"),
        (branches, "control flow"),
        (shapes, "cannot be traced|has no place|nonzero|index"),
        (mixes, "rows that mix"),
        (turned, "rows that mix"),
        (attends, "product of two values"),
        (sorts, "torch.sort"),
        (stops, "detach"),
        (spikes, "autograd.Function"),
        (hides, r"torch.no_grad inside of the step: write .detach\(\)"),
        (reads_data, r".data of a tensor: write .detach\(\)"),
        (clips, "hook on a gradient"),
        (clips_by_node, "differs from the step itself .* in its gradient by x"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_words(step: object, said: str) -> None:
    with pytest.raises(NotFused, match=said):
        compile_step(step, (draw(4, 3),), False, draw(4, 3))


@pytest.mark.parametrize("step", [mixes, turned])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("solver", ["auto", "deer", tl.solvers.Shooting(chunk=5)])
def test_rows_that_mix_are_refused_where_chunks_are_rows(step: object, batch: int, solver: object) -> None:
    h0, xs = draw(batch, 3), draw(20, batch, 3)
    with pytest.raises(ValueError, match=r"treat rows independently .* chunks of time are rows, too"):
        tl.unroll(step, h0, xs, solver)  # type: ignore[arg-type]
    h, states = h0, tl.unroll(step, h0, xs, "sequential")[0]
    for x in xs:
        h = step(h, x)
    assert torch.allclose(states[-1], h)


def test_rows_that_only_seem_to_mix_are_run() -> None:
    """What a trace cannot tell is asked of the step itself."""

    def there_and_back(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * h.flip(0).flip(0) + x + 0 * h.sum(0))

    h0, xs = draw(3, 3), draw(20, 3, 3)
    states, report = tl.unroll(there_and_back, h0, xs)
    assert "rows that mix" in report.reason
    h = h0
    for x in xs:
        h = torch.tanh(0.5 * h + x)
    assert torch.allclose(states[-1], h, atol=1e-6)


def test_a_step_that_is_not_compiled_runs_and_the_report_says_why() -> None:
    h0, xs = draw(2, 3), draw(20, 2, 3)
    states, report = tl.unroll(stops, h0, xs)
    assert "not fused: torch.detach" in report.reason
    h = h0
    for x in xs:
        h = stops(h, x)
    assert torch.allclose(states[-1], h)


def test_what_no_rule_was_written_for_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumbles(*_: object) -> Tensor:
        raise IndexError("out of range")

    monkeypatch.setitem(lanes._RULES, "softplus", stumbles)
    h0, xs = draw(2, 3), draw(20, 2, 3)

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(F.softplus(h) + x)

    states, report = tl.unroll(step, h0, xs)
    assert "not fused: it has no normal form: IndexError: out of range" in report.reason
    assert torch.allclose(states, plain(step, h0, xs))


class Scaled(nn.Module):
    """Holds a number that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.5
        self._hidden = 0.0
        self.weight = nn.Parameter(0.3 * torch.eye(3, dtype=torch.float64))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        kept = torch.tanh(h @ self.weight) * self.factor + x + self._hidden
        return kept if self.training else kept + 1


def plain(cell: object, h: Tensor, xs: Tensor) -> Tensor:
    states = []
    for x in xs:
        h = cell(h, x)
        states.append(h)
    return torch.stack(states)


@needs_kernels
def test_a_cell_that_changes_is_seen() -> None:
    cell, h0, xs = Scaled(), draw(2, 3), draw(30, 2, 3)

    def agrees() -> str:
        states, report = tl.unroll(cell, h0, xs)
        with torch.no_grad():
            assert torch.allclose(states, plain(cell, h0, xs), atol=1e-12)
        return report.reason

    assert agrees().endswith("; fused")
    with torch.no_grad():
        cell.weight += 0.1  # trained: nothing is compiled anew
    assert agrees().endswith("; fused")
    cell.weight = nn.Parameter(0.2 * torch.ones(3, 3, dtype=torch.float64))
    assert agrees().endswith("; fused")
    cell.factor = 0.25
    assert agrees().endswith("; fused")
    cell.eval()
    assert agrees().endswith("; fused")
    cell._hidden = 0.3
    assert "not fused: what the step refers to changes from call to call" in agrees()


HELD = {"factor": 0.5}


def refers(h: Tensor, x: Tensor) -> Tensor:
    return HELD["factor"] * h + torch.tanh(0.3 * h + x)


@needs_kernels
def test_a_small_change_behind_the_step_is_seen_and_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that moves a step by less than its rounding might, and the states by a thousand times their own."""
    h0, xs = torch.zeros(2, 3), torch.full((300, 2, 3), 0.5)
    told = []
    for factor in (0.5, 0.50005, 0.50005):
        monkeypatch.setitem(HELD, "factor", factor)
        states, report = tl.unroll(refers, h0, xs)
        assert (states - plain(refers, h0, xs)).abs().max() < 1e-6
        told.append(report.reason.rpartition("; ")[2])
    assert told == ["fused", "fused", "fused"]


@needs_kernels
def test_a_value_that_changes_in_every_call_is_not_compiled_every_time() -> None:
    cell, h0, xs = Scaled(), draw(2, 3), draw(30, 2, 3)
    told = []
    for call in range(8):
        cell.factor = 0.5 + 0.01 * call
        states, report = tl.unroll(cell, h0, xs)
        with torch.no_grad():
            assert torch.allclose(states, plain(cell, h0, xs), atol=1e-12)
        told.append(report.reason)
    assert [reason.endswith("; fused") for reason in told] == [True] * remember.MOST_AT_ONCE + [False] * 5
    assert "the value of factor changes from call to call" in told[-1]
    for _ in range(remember.CALLS_THAT_PAY):  # now it stays
        _, report = tl.unroll(cell, h0, xs)
    assert report.reason.endswith("; fused")


@needs_kernels
def test_jumps_that_a_solver_may_leave_are_no_other_step() -> None:
    h0, xs = torch.ones(1, 3), torch.zeros(100, 1, 3)
    solver = tl.solvers.Shooting(chunk=33, warmup=0, correction="none", tol=0.5, max_iters=1, on_divergence="ignore")
    for _ in range(2):
        _, report = tl.unroll(lambda h, x: 0.999 * h + x, h0, xs, solver=solver)
        assert report.reason.endswith("fused")
        assert "not fused" not in report.reason


@needs_kernels
def test_training_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(0.3 * draw(3, 3))
    h0, xs = draw(2, 3), draw(30, 2, 3)
    traced = []
    from timeloom.compile import fuse

    original = fuse.traced_by_rows
    monkeypatch.setattr(fuse, "traced_by_rows", lambda *args: traced.append(1) or original(*args))
    optimiser = torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        states, report = tl.unroll(lambda h, x: torch.tanh(h @ weight + x), h0, xs)  # a new lambda every time
        assert report.reason.endswith("; fused")
        optimiser.zero_grad()
        states.square().sum().backward()
        optimiser.step()
    assert len(traced) == 1


def test_a_cell_is_let_go() -> None:
    cell = Scaled()
    tl.unroll(cell, draw(2, 3), draw(30, 2, 3))
    watched = weakref.ref(cell), weakref.ref(cell.weight)
    del cell
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_short_runs_are_not_worth_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "FEWEST_STEPS", 50)
    cell, h0, xs = Scaled(), draw(2, 3), draw(30, 2, 3)
    assert "too few steps" in tl.unroll(cell, h0, xs)[1].reason
    assert "too few steps" not in tl.unroll(cell, h0, xs)[1].reason


class Remade(nn.Module):
    """Computes with a tensor that its owner makes anew for every call."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(0.3 * draw(3, 3))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ self._made + x)


HELD: dict[str, Tensor] = {}


def by_dictionary(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h @ HELD["made"] + x)


class Box:
    made: Tensor


def by_object(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h @ Box.made + x)


@pytest.mark.parametrize("held", ["attribute", "dictionary", "out of sight"])
def test_a_tensor_that_is_made_anew_for_every_call_has_its_own_gradient(held: str) -> None:
    cell, xs = Remade(), draw(12, 2, 3)
    step = {"attribute": cell, "dictionary": by_dictionary, "out of sight": by_object}[held]
    for _ in range(3):
        cell._made = HELD["made"] = Box.made = cell.base * 0.5
        states, report = tl.unroll(step, draw(2, 3), xs)
        (found,) = torch.autograd.grad(states.sum(), cell.base)
        h, total, weight = draw(2, 3), 0.0, cell.base * 0.5
        for x in xs:
            h = torch.tanh(h @ weight + x)
            total = total + h.sum()
        (truth,) = torch.autograd.grad(total, cell.base)
        assert torch.allclose(found, truth, rtol=1e-10)
        assert ("not fused: it computes with a tensor made outside" in report.reason) == (held == "out of sight")


@needs_kernels
@pytest.mark.parametrize(
    ("units", "inner", "fused"), [(16, 13, True), (16, 26, True), (8, 143, True), (5, 7 * 11 * 13 * 17, False)]
)
def test_widths_are_not_taken_for_numbers_of_rows(units: int, inner: int, fused: bool) -> None:
    """Steps are traced with 13 rows at first, then with a few other primes: what is a multiple of all runs as it is."""
    torch.manual_seed(0)
    into, out, scale = nn.Linear(units, inner).double(), nn.Linear(inner, units).double(), draw(inner)

    def step(h: Tensor, x: Tensor) -> Tensor:
        of_x = torch.sigmoid(scale.expand(len(x), inner) * x[:, :1])
        return torch.tanh(out(torch.tanh(into(h) + of_x)))

    h, xs = draw(3, units), draw(6, 3, 4)
    states, report = tl.unroll(step, h, xs)
    assert report.reason.endswith("; fused") == fused
    assert fused or "not fused: torch.expand of what does not depend on the state, for 18 rows" in report.reason
    for x, state in zip(xs, states, strict=True):
        h = step(h, x)
        assert torch.allclose(state, h, rtol=1e-11, atol=1e-12)


def test_a_step_that_returns_a_number_is_told() -> None:
    with pytest.raises(TypeError, match="the cell returned float, expected a tensor"):
        tl.unroll(lambda h, x: 3.0, draw(2, 3), draw(20, 2, 3))


def test_inputs_need_not_be_numbers() -> None:
    table = nn.Embedding(11, 4).double()
    weight = draw(4, 4) / 4

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ weight + table(x))

    xs = torch.randint(0, 11, (40, 2), generator=torch.Generator().manual_seed(0))
    states, report = tl.unroll(cell, draw(2, 4), xs)
    assert "not fused" not in report.reason or build.unavailable() is not None
    loop = plain(cell, draw(2, 4), xs)
    assert torch.allclose(states, loop)
    found, wanted = (torch.autograd.grad(value.square().sum(), table.weight)[0] for value in (states, loop))
    assert torch.allclose(found, wanted)


@needs_kernels
def test_check_cell_says_what_is_fused_and_what_is_not() -> None:
    report = tl.check_cell(
        tl.cells.SLSTM(3, 8, heads=2).double(), (draw(4, 8), draw(4, 8), draw(4, 8).abs() + 1, draw(4, 8)), draw(4, 3)
    )
    assert report.fused
    assert "4 × 4×4 in 2 blocks" in report.form
    report = tl.check_cell(lambda h, x: h.cumsum(-1) * 0.1 + x, draw(4, 3), draw(4, 3))
    assert not report.fused
    assert "torch.cumsum" in report.form


def flood(h: Tensor, x: Tensor) -> Tensor:
    """Units that look at each other only where it rains a lot: the first days are dry."""
    return 0.9 * h + x + torch.where(x > 0.5, 0.3 * h.cumsum(-1), torch.zeros_like(h))


@pytest.mark.parametrize("wet", [1, 40, 77])
def test_a_cell_that_is_diagonal_on_dry_days_alone_is_found_out(wet: int) -> None:
    xs = torch.zeros(80, 1, 3, dtype=torch.float64)
    xs[wet] = 1.0
    h0 = draw(1, 3).abs() + 1
    states, report = tl.unroll(flood, h0, xs, solver="deer")
    assert torch.allclose(states, plain(flood, h0, xs), rtol=1e-10)
    assert not report.fell_back


@needs_kernels
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_torchs_own_cells_are_compiled(kind: type[nn.RNNCellBase]) -> None:
    cell, xs = kind(4, 3, dtype=torch.float64), draw(20, 2, 4)  # type: ignore[call-arg]
    h0 = (draw(2, 3), draw(2, 3)) if kind is nn.LSTMCell else draw(2, 3)
    states, report = tl.unroll(lambda h, x: cell(x, h), h0, xs)
    assert report.reason.endswith("; fused")
    h = h0
    for x in xs:
        h = cell(x, h)
    pairs = zip(states, h, strict=True) if isinstance(states, tuple) else [(states, h)]
    assert all(torch.allclose(given[-1], last, atol=1e-12) for given, last in pairs)


@needs_kernels
def test_one_function_around_many_kinds_of_cells_is_compiled_for_each() -> None:
    """Classes are not values that change from call to call: a step that is handed another one is another step."""
    torch.manual_seed(0)
    kinds = [type(f"Own{index}", (nn.RNNCell,), {}) for index in range(remember.MOST_AT_ONCE + 3)]

    def step_of(cell: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda h, x, cell=cell: cell(x, h)

    xs, h0 = torch.randn(600, 2, 3), torch.zeros(2, 3)
    told = [tl.unroll(step_of(kind(3, 3)), h0, xs)[1].reason for kind in kinds]
    assert all(reason.endswith("; fused") for reason in told), told


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a margin": lambda x: F.pad(x, (13, 0)),
    "a margin behind": lambda x: F.pad(x, (0, 13)),
    "a value": lambda x: F.pad(x, (6, 7)) / x.new_full((len(x), 1), 13),
    "a constant's value": lambda x: F.pad(x, (6, 7)) / torch.full((20,), 13),
    "a first number": lambda x: F.pad(x, (6, 7)) * torch.arange(13, 33),
    "a width": lambda x: torch.cat([x, x.new_zeros(len(x), 13)], -1),
    "rows": lambda x: F.pad(x, (6, 7)) * x[torch.arange(len(x)), (x[:, 0] > 0).long()].unsqueeze(-1),
}


@needs_kernels
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_step_are_not_taken_for_numbers_of_rows(name: str) -> None:
    """Steps are traced with 13 rows."""
    weight, made = 0.2 * draw(20, 20), NUMBERS[name]

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ weight + 0.1 * made(x))

    for steps, batch in ((20, 3), (1, 1), (2, 2)):
        xs = [draw(steps, batch, 7).requires_grad_() for _ in "ab"]
        states, report = tl.unroll(step, draw(batch, 20), xs[0])
        assert report.reason.endswith("; fused")
        expected = plain(step, draw(batch, 20), xs[1])
        assert torch.allclose(states, expected)
        states.sum().backward()
        expected.sum().backward()
        assert xs[0].grad is not None
        assert xs[1].grad is not None
        assert torch.allclose(xs[0].grad, xs[1].grad)
