"""Every cell of `timeloom.cells` by generated kernels, against loops over its equations: values and all gradients."""

from __future__ import annotations

import cell_equations
import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from benchmarks.authors_cells import LTC
from timeloom import cells
from timeloom.compile import remember
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.fused import FusedSums, FusedSweeper
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread", "at_once")

INPUTS = 3
UNITS = {
    "LayerNormGRU": 19, "LayerNormLSTM": 5, "SLSTM": 21, "BlockGRU": 36, "LiGRU": 17, "PeepholeLSTM": 9, "CTRNN": 33,
    "CfC": 7, "MinimalGRU": 1,
}  # fmt: skip


def test_no_cell_is_left_out() -> None:
    public = {name: getattr(cells, name) for name in cells.__all__}
    steps = {name for name, cell in public.items() if issubclass(cell, cells.Step) and cell is not cells.Step}
    assert steps == set(UNITS) == set(cell_equations.OPTIONS) == set(cell_equations.EQUATIONS)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are compiled at their first step, not when they have made enough of them."""
    monkeypatch.setattr(remember, "FEWEST_STEPS", 0)


def make(name: str, dtype: torch.dtype = torch.float64) -> cells.Step:
    units, options = UNITS[name], cell_equations.OPTIONS[name]
    torch.manual_seed(0)
    cell: cells.Step = getattr(cells, name)(INPUTS, units, **options).to(dtype)
    with torch.no_grad():
        for parameter in cell.parameters():  # norms of ones and zeros would hide what is wrong with them
            parameter += 0.3 * torch.randn_like(parameter)
    return cell


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def start_of(cell: cells.Step, batch: int) -> tuple[Tensor, ...]:
    return tuple(0.5 * draw(batch, cell.hidden_size).abs().requires_grad_() + k for k in range(cell.parts))


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves, strict=True)]


def apart(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-3))


def was_fused(layer: tl.Layer) -> bool:
    return all(report.reason.endswith("fused") and "not fused" not in report.reason for report in layer.reports)


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (23, 1), (40, 3)])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("name", UNITS)
def test_a_layer_is_the_loop_over_the_equations(name: str, ragged: bool, steps: int, batch: int) -> None:
    cell = make(name)
    layer = tl.Layer(cell, solver=Shooting(chunk=7))
    x = draw(steps, batch, INPUTS).requires_grad_()
    start = start_of(cell, batch)
    lengths = torch.tensor([steps, steps // 3, 0])[:batch] if ragged else None
    resets = torch.rand(steps, batch, generator=torch.Generator().manual_seed(2)) < 0.15 if ragged else None
    hx = tuple(part.unsqueeze(0) for part in start)
    y, final = layer(x, hx if cell.parts > 1 else hx[0], lengths=lengths, resets=resets)
    final = final if isinstance(final, tuple) else (final,)
    parameters = dict(cell.named_parameters())
    expected, last = cell_equations.loop(name, parameters, start, x, lengths, resets)
    assert build.unavailable() is not None or was_fused(layer)
    assert apart(y, expected[0]) < 1e-12
    for given, wanted in zip(final, last, strict=True):
        assert apart(given[0], wanted) < 1e-12
    weights = [draw(*y.shape), *(draw(batch, cell.hidden_size) for _ in final)]
    leaves = [x, *start, *parameters.values()]
    given = gradients(sum((w * v).sum() for w, v in zip(weights, (y, *(f[0] for f in final)), strict=True)), leaves)
    wanted = gradients(sum((w * v).sum() for w, v in zip(weights, (expected[0], *last), strict=True)), leaves)
    for grad, truth in zip(given, wanted, strict=True):
        assert apart(grad, truth) < 1e-10


@pytest.mark.parametrize("name", ["LayerNormGRU", "SLSTM", "CfC"])
def test_float32_is_no_worse_than_the_loop_in_float32(name: str) -> None:
    exact = make(name)
    cell = make(name, torch.float32)
    x = draw(300, 2, INPUTS)
    start = tuple(torch.zeros(2, cell.hidden_size) for _ in range(cell.parts))
    states, report = tl.unroll(cell, start if cell.parts > 1 else start[0], x.float())
    assert "not fused" not in report.reason or build.unavailable() is not None
    y = states[0] if cell.parts > 1 else states
    with torch.no_grad():
        truth = cell_equations.loop(name, dict(exact.named_parameters()), tuple(s.double() for s in start), x)[0][0]
        plain = cell_equations.loop(name, dict(cell.named_parameters()), start, x.float())[0][0]
    error, unavoidable = ((value.double() - truth).abs().max() for value in (y.detach(), plain))
    assert error <= 2 * unavoidable + 2e-6


@pytest.mark.parametrize("name", ["SLSTM", "CfC", "LayerNormGRU"])
def test_a_backward_pass_does_not_give_up_over_rounding(name: str) -> None:
    torch.manual_seed(0)
    layer = tl.Layer(getattr(cells, name)(INPUTS, 64))
    x = torch.randn(2048, 1, INPUTS)
    for _ in range(4):
        layer(x)[0].square().mean().backward()
        report = layer.reports[0]
        assert report.converged
        assert report.backward is not None
        assert report.backward.converged
        assert not report.backward.fell_back
        assert report.backward.residuals[-1] <= 1e-6
    assert report.backward.iterations == 1  # it is known by now what is rounding


@pytest.mark.parametrize("name", ["LayerNormLSTM", "LiGRU"])
def test_layers_and_directions_are_stacked_as_torchs(name: str) -> None:
    layer = tl.Layer(make(name), num_layers=2, bidirectional=True, batch_first=True).double()
    x, lengths = draw(3, 11, INPUTS), torch.tensor([11, 4, 7])
    y, final = layer(x, lengths=lengths)
    h = x.transpose(0, 1)
    for depth in range(2):
        sides = []
        for direction in range(2):
            cell = layer.cells[2 * depth + direction]
            zeros = tuple(torch.zeros(3, cell.hidden_size, dtype=torch.float64) for _ in range(cell.parts))
            seen = h if direction == 0 else backwards(h, lengths)
            states, last = cell_equations.loop(name, dict(cell.named_parameters()), zeros, seen, lengths)
            sides.append(states[0] if direction == 0 else backwards(states[0], lengths))
            given = final if isinstance(final, tuple) else (final,)
            for part, wanted in zip(given, last, strict=True):
                assert apart(part[2 * depth + direction], wanted) < 1e-11
        h = torch.cat(sides, -1)
    assert apart(y, h.transpose(0, 1)) < 1e-11


@pytest.mark.parametrize("name", UNITS)
def test_gradients_go_through_all_layers(name: str) -> None:
    """Behind the first layer x is as wide as the state."""
    layer = tl.Layer(make(name), num_layers=2).double()
    x = draw(19, 3, INPUTS).requires_grad_()
    h = x
    for cell in layer.cells:
        zeros = tuple(torch.zeros(3, cell.hidden_size, dtype=torch.float64) for _ in range(cell.parts))
        h = cell_equations.loop(name, dict(cell.named_parameters()), zeros, h)[0][0]
    y, _ = layer(x)
    assert build.unavailable() is not None or was_fused(layer)
    leaves, probe = [x, *layer.parameters()], draw(*y.shape)
    for given, expected in zip(gradients((y * probe).sum(), leaves), gradients((h * probe).sum(), leaves), strict=True):
        assert apart(given, expected) < 1e-10


def backwards(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack(
        [torch.cat([x[:length, b].flip(0), x[length:, b]]) for b, length in enumerate(lengths.tolist())], 1
    )


@pytest.mark.parametrize("lengths", [None, [31, 7, 40]], ids=["even", "ragged"])
@pytest.mark.parametrize("name", UNITS)
def test_gradients_of_inputs_that_nobody_asks_for_are_not_made(
    name: str, lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    new_sums = FusedSweeper.new_sums

    def watched(self: FusedSweeper) -> FusedSums | None:
        sums = new_sums(self)
        made.append(sums is not None and sums.inputs is not None)
        return sums

    monkeypatch.setattr(FusedSweeper, "new_sums", watched)
    cell = make(name)
    layer, parameters = tl.Layer(cell, solver=Shooting(chunk=7)), list(cell.parameters())
    found = []
    for asked in (True, False):
        x = draw(40, 3, INPUTS).requires_grad_(asked)
        output, _ = layer(x, lengths=None if lengths is None else torch.tensor(lengths))
        found.append(gradients(output.square().sum(), parameters))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert made == [True, UNITS[name] < INPUTS], "what parameters make of x is asked for in any case"


def test_dropout_is_between_layers_and_in_training_alone() -> None:
    layer = tl.Layer(make("LiGRU"), num_layers=2, dropout=1.0).double()
    x = draw(9, 2, INPUTS)
    silenced, heard = layer(x)[0], layer.eval()(x)[0]
    assert apart(silenced, heard) > 1e-3
    assert apart(tl.Layer(layer.cells[1])(torch.zeros(9, 2, 17, dtype=torch.float64))[0], silenced) < 1e-12


def test_a_state_dict_moves_to_another_layer() -> None:
    first, second = (tl.Layer(make("CTRNN"), num_layers=2).double() for _ in "ab")
    x = draw(9, 2, INPUTS)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x)[0], second(x)[0])


class Leaky(nn.Module):
    """A state of one number for each sequence, `(B,)`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.4, dtype=torch.float64))

    def initial(self, batch: int) -> Tensor:
        return self.weight.new_zeros(batch)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.weight * h + x)


def test_a_layer_of_one_number_for_each_sequence() -> None:
    x, cell = draw(9, 2), Leaky()
    y, final = tl.Layer(cell)(x)
    h, states = cell.initial(2), []
    for row in x:
        h = cell(h, row)
        states.append(h)
    assert apart(y, torch.stack(states)) < 1e-12
    assert apart(final, h.unsqueeze(0)) < 1e-12


def test_padding_is_not_looked_at() -> None:
    layer = tl.Layer(make("LayerNormGRU"))
    x, lengths = draw(9, 2, INPUTS), torch.tensor([9, 4])
    spoiled = x.clone()
    spoiled[4:, 1] = torch.nan
    (y, _), (z, _) = layer(x, lengths=lengths), layer(spoiled, lengths=lengths)
    assert torch.equal(y, z)
    z.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: tl.Layer(nn.Linear(2, 2)), "initial"),
        (lambda: tl.Layer(cells.CTRNN(2, 3), num_layers=0), "num_layers"),
        (lambda: tl.Layer(cells.CTRNN(2, 3), dropout=2.0), "dropout"),
        (lambda: cells.SLSTM(2, 6, heads=4), "heads must divide the 6 units"),
        (lambda: cells.CTRNN(0, 3), "input_size"),
        (lambda: cells.CTRNN(2, 3, rate=1.0), "rate"),
        (lambda: tl.Layer(cells.CTRNN(2, 3))(torch.randn(4)), "shape"),
        (lambda: tl.Layer(cells.CTRNN(2, 3))(torch.randn(4, 2, 2), torch.zeros(1, 2, 4)), "expected"),
        (lambda: tl.Layer(cells.CTRNN(2, 3))(torch.randn(0, 2, 2)), "no time steps"),
    ],
)
def test_what_is_wrong_is_said(wrong: object, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        wrong()


@pytest.mark.parametrize("missing", ["all", "of this step"])
def test_a_step_without_kernels_is_told_and_runs_by_itself(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """No C compiler, with and without the kernels of a wheel: nothing is called fused that is not."""
    if missing == "all":
        monkeypatch.setattr(build, "unavailable", lambda: "no C compiler found")
    monkeypatch.setattr(build, "generated", lambda *_: "no C compiler found\nand more")
    cell, x = make("SLSTM"), draw(60, 2, INPUTS)
    start = start_of(cell, 2)
    states, report = tl.unroll(cell, start, x)
    assert report.reason.endswith("not fused: no C compiler found")
    assert tl.check_cell(cell, start, x[0]).form == "no C compiler found"
    torch.testing.assert_close(states[0], cell_equations.loop("SLSTM", dict(cell.named_parameters()), start, x)[0][0])
    gru = tl.GRU(INPUTS, 5, zoneout=0.2, dtype=torch.float64, solver=Shooting(chunk=7))
    gru(x)
    assert gru.reports[0].reason.endswith("not fused: no C compiler found")


def test_uses_of_a_parameter_cancel_within_a_step() -> None:
    """Of an LTC's capacity: it multiplies the state before, and divides by itself and the leak."""
    torch.manual_seed(0)
    cell, x = LTC(8, 16), torch.randn(1024, 1, 8)

    def capacity_grad(dtype: torch.dtype, fused: bool) -> Tensor:
        cell.to(dtype)
        v, states = torch.zeros(1, 16, dtype=dtype), []
        for given in () if fused else x.to(dtype):
            v = cell(v, given)
            states.append(v)
        found = tl.unroll(cell, v, x.to(dtype), solver=Shooting(chunk=len(x)))[0] if fused else torch.stack(states)
        assert isinstance(found, Tensor)
        return gradients(found.square().mean(), [cell.capacity])[0].double()

    looped, fused = (capacity_grad(torch.float32, way) for way in (False, True))
    truth = capacity_grad(torch.float64, False)
    assert (fused - truth).abs().max() < 2 * (looped - truth).abs().max()
