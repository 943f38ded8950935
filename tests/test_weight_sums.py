"""Gradients of weights and biases by the kernels of weight_sums.cu, emulated on a CPU, against float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from emulated_weight_sums import emulate
from emulator import COMPILER
from nvrtc_layout import same_layout
from torch import Tensor

from timeloom.kernels import faults
from timeloom.kernels.cuda import nvrtc, weight_sums
from timeloom.kernels.cuda.programs import WeightSumsArgs, headers
from timeloom.kernels.cuda.weight_sums import TILES, WeightSums

emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
compiled = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no NVRTC: {nvrtc.unavailable()}")
KINDS = (
    "normal", "fading", "one sign", "tiny", "huge", "denormal", "columns apart", "far apart in time", "with zeros",
)  # fmt: skip
GATES = {"gru": 4, "lstm": 4, "rnn": 1}


class Given(NamedTuple):
    """Gate gradients `(N, G)`, inputs `(N, D)`, states before each step `(N, n)`."""

    grads: Tensor
    x: Tensor
    before: Tensor

    def double(self) -> Given:
        return Given(*(one.double() for one in self))


def drawn(kernel: str, steps: int, units: int, inputs: int, kind: str = "normal") -> Given:
    generator = torch.Generator().manual_seed(0)
    widths = GATES[kernel] * units, inputs, units
    grads, x, before = (torch.randn(steps, width, generator=generator) for width in widths)
    if kind == "fading":
        grads *= torch.logspace(0, -6, steps).unsqueeze(1)
    if kind == "far apart in time":
        grads *= torch.logspace(0, -12, steps).unsqueeze(1)
        x *= torch.logspace(-12, 0, steps).unsqueeze(1)
    if kind == "with zeros":
        grads[: steps // 2], grads[:, : units // 2], x[steps // 3 :, 1::2] = 0, 0, 0
        grads[0, 0] = x[0, 0] = 1
    if kind == "one sign":
        grads, x = grads.abs(), x.abs()
    if kind == "columns apart":
        x, before = x * torch.logspace(2, -2, inputs), before * torch.logspace(-2, 2, units)
    return Given(grads * {"tiny": 1e-30, "huge": 1e30, "denormal": 1e-40}.get(kind, 1.0), x, before)


def by_torch(kernel: str, given: Given, biased: bool = True) -> WeightSums:
    return weight_sums._by_products(kernel, *given, biased)


def off(found: Tensor, exact: Tensor) -> float:
    """Relative to the largest value of each row."""
    most = exact.abs().amax(-1, keepdim=True).clamp(min=1e-300)
    return float(((found - exact).abs() / most).max())


def assert_as_precise(kernel: str, given: Given, found: WeightSums, least: float = 5e-7) -> None:
    exact, plain = by_torch(kernel, given.double()), by_torch(kernel, given)
    for name, own, true, float32 in zip(WeightSums._fields, found, exact, plain, strict=True):
        assert own.shape == true.shape
        assert own.is_contiguous()
        assert off(own, true) <= max(least, 1.5 * off(float32, true)), name


@emulated
@pytest.mark.parametrize("kind", KINDS)
def test_as_precise_as_float32(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = emulate(monkeypatch)
    given = drawn("gru", 330, 32, 24, kind)
    found = weight_sums.weight_sums("gru", *given, True)
    assert_as_precise("gru", given, found, 2e-6 if kind == "denormal" else 5e-7)
    assert [name for name, _ in launches] == ["sum_weights", "add_up"]
    assert launches[0][1] > 2, "several shares"


@emulated
@pytest.mark.parametrize("in_reverse", [False, True], ids=["in order", "in reverse"])
@pytest.mark.parametrize(
    ("kernel", "steps", "units", "inputs"),
    [
        ("gru", 1, 1, 1),
        ("gru", 70, 33, 7),
        ("lstm", 33, 20, 40),
        ("rnn", 100, 5, 3),
        ("gru", 64, 64, 64),
        ("lstm", 40, 64, 1),
        ("gru", 35, 100, 36),
        ("rnn", 31, 130, 132),
    ],
)
def test_any_size(
    kernel: str, steps: int, units: int, inputs: int, in_reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch, in_reverse)
    given = drawn(kernel, steps, units, inputs)
    assert_as_precise(kernel, given, weight_sums.weight_sums(kernel, *given, True))
    without = weight_sums.weight_sums(kernel, *given, False)
    assert without.b_ih is without.b_hh is None
    assert off(without.w_hh, by_torch(kernel, given.double()).w_hh) < 5e-7


@emulated
def test_rows_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views into wider matrices, whose rows are or are not aligned, and one turned around."""
    emulate(monkeypatch)
    given = drawn("gru", 90, 32, 16)
    for first, more in ((0, 4), (1, 3)):
        around = [torch.full((90, one.shape[1] + more), torch.nan) for one in given]
        for wide, one in zip(around, given, strict=True):
            wide[:, first : first + one.shape[1]] = one
        views = Given(*(wide[:, first : first + one.shape[1]] for wide, one in zip(around, given, strict=True)))
        assert_as_precise("gru", given, weight_sums.weight_sums("gru", *views, True))
    turned = given._replace(x=given.x.t().contiguous().t())
    assert_as_precise("gru", given, weight_sums.weight_sums("gru", *turned, True))


@emulated
@pytest.mark.parametrize("units", [32, 33])
def test_what_is_not_finite_stays_in_its_column(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    given = drawn("gru", 120, units, 24)
    clean = by_torch("gru", given.double())
    given.grads[3, 5], given.grads[7, 3 * units + 2], given.x[100, 9] = torch.nan, torch.inf, -torch.inf
    found, expected = weight_sums.weight_sums("gru", *given, True), by_torch("gru", given)
    for own, like, true in zip(found, expected, clean, strict=True):
        finite = like.isfinite()
        assert torch.equal(own.isfinite(), finite)
        assert finite.any()
        assert (own - true)[finite].abs().max() <= 1e-6 * true.abs().max()


@emulated
def test_the_same_bits_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn("gru", 130, 32, 32)
    found = []
    for in_reverse in (False, True):
        emulate(monkeypatch, in_reverse)
        found.append(weight_sums.weight_sums("gru", *given, True))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_where_the_kernel_cannot_run_torch_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise nvrtc.CompileError("no NVRTC")

    emulate(monkeypatch)
    monkeypatch.setattr(weight_sums, "function", fails)
    monkeypatch.setattr(faults, "_broken", {})
    given = drawn("gru", 60, 8, 4)
    with pytest.warns(RuntimeWarning, match="weight sums kernel cannot run.*no NVRTC"):
        found = weight_sums.weight_sums("gru", *given, True)
    assert_as_precise("gru", given, found)


@pytest.mark.parametrize("units", [8, 32, 64, 128, 256, 1024])
@pytest.mark.parametrize("steps", [1, 100, 16384, 262144])
def test_shares_fill_the_processors_and_little_memory(steps: int, units: int) -> None:
    tile = weight_sums._tile(3 * units, units, units)
    tiles = 2 * tile.tiles(3 * units, units)
    share = weight_sums.share_of(steps, tiles, tile, 132)
    shares = -(-steps // share)
    assert share % weight_sums.STEPS == 0
    assert shares * tiles * tile.numbers <= max(weight_sums.MOST_PARTIAL, tiles * tile.numbers)
    waves = shares * tiles / (132 * tile.at_once)
    assert steps < 10_000 or tile.at_once > 1 or waves / -(-waves // 1) > 0.7


def test_tiles_fit_the_layers() -> None:
    small, middle, square = TILES
    assert [weight_sums._tile(3 * n, n, n) for n in (16, 32, 64, 128, 512)] == [small, small, middle, square, square]


@compiled
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("tile", TILES)
def test_it_compiles(tile: weight_sums.Tile, aligned: bool) -> None:
    same = same_layout("WeightSumsArgs", WeightSumsArgs, "partial", "steps", "rows")
    same += f"static_assert(STEPS == {weight_sums.STEPS} && SLOTS == {weight_sums.SLOTS});\n"
    same += f"static_assert(GROUP == {weight_sums.GROUP} && 32 * ADDERS == {weight_sums.ADDERS});\n"
    same += f"static_assert(COLUMNS == {tile.threads} && TILE_FLOATS == {tile.numbers});\n"
    size = "4 * HALVES * 2 + 2 * (SLOTS + 1) * GROUPS * 4"
    same += f"static_assert({size} == {tile.shared_bytes});\n"
    for architecture in ("sm_80", "sm_90"):
        code = nvrtc.compile_source(tile.source(aligned) + same, architecture, headers())
        assert b"sum_weights" in code
        assert b"add_up" in code
