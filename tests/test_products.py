"""Large products by the Triton kernels against float64. They run through Triton's interpreter, on a CPU."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported

import pytest
import torch
from torch import Tensor

from timeloom.kernels import faults
from timeloom.kernels.cuda import products
from timeloom.kernels.cuda.products import Rows, Tile

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="for Triton's interpreter")

SMALL = Tile(32, 32, 32, 4, 3)
STEPS, INPUTS, GATES = 1200, 64, 80
KINDS = ("normal", "fading", "one sign", "tiny", "huge", "columns apart", "far apart in time", "with zeros")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels run, of whatever size; their launches."""
    launches: list[Any] = []  # their names, and grids

    def noted(kernel: Any, grid: tuple[int, int, int], *given: Any, **constants: Any) -> None:
        launches.append((kernel.fn.__name__, grid))
        products_launch(kernel, grid, *given, **constants)

    products_launch = products.launch
    monkeypatch.setattr(products, "launch", noted)
    monkeypatch.setattr(products, "_can_run", lambda x: True)
    monkeypatch.setattr(products, "_processors", lambda x: 8)
    monkeypatch.setattr(products, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(products, "LEAST_TERMS", 0)
    monkeypatch.setattr(products, "LEAST_SUMMED", 0)
    monkeypatch.setattr(products, "WIDE", SMALL)
    monkeypatch.setattr(products, "LONG", SMALL)
    return launches


def drawn(kind: str, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Gate gradients `(steps, GATES)` and inputs `(steps, INPUTS)`."""
    generator = torch.Generator().manual_seed(0)
    grads, x = (torch.randn(steps, width, generator=generator) for width in (GATES, INPUTS))
    if kind == "fading":
        grads *= torch.logspace(0, -6, steps).unsqueeze(1)
    if kind == "far apart in time":
        grads *= torch.logspace(0, -12, steps).unsqueeze(1)
        x *= torch.logspace(-12, 0, steps).unsqueeze(1)
    if kind == "with zeros":
        grads[: steps // 2], grads[:, :40], x[steps // 3 :, 1::2] = 0, 0, 0
        grads[0, 0] = x[0, 1] = 1
    if kind == "one sign":
        grads, x = grads.abs(), x.abs()
    if kind == "columns apart":
        x *= torch.logspace(2, -2, INPUTS)
    return grads * {"tiny": 1e-30, "huge": 1e30}.get(kind, 1.0), x


def off(found: Tensor, exact: Tensor, dim: int) -> float:
    """Relative to the largest value of each row, or column."""
    return float(((found - exact).abs() / exact.abs().amax(dim, keepdim=True).clamp(min=1e-300)).max())


def summed(grads: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    return products.sum_outer(Rows(grads), Rows(x), 0, grads.shape[1], out)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_rows_are_as_precise_as_float32(kernels: list[Any], kind: str) -> None:
    grads, x = drawn(kind, 100)
    weights = torch.randn(GATES, INPUTS, generator=torch.Generator().manual_seed(1)) / 8
    bias = torch.linspace(-1, 1, GATES)
    u, d_x = products.multiply(x, weights.t(), bias), products.multiply(grads, weights)
    exact_u, exact_d_x = torch.addmm(bias.double(), x.double(), weights.double().t()), grads.double() @ weights.double()
    assert off(u, exact_u, 1) <= max(5e-7, 1.5 * off(torch.addmm(bias, x, weights.t()), exact_u, 1))
    assert off(d_x, exact_d_x, 1) <= max(5e-7, 1.5 * off(grads @ weights, exact_d_x, 1))
    assert [name for name, _ in kernels] == ["split_kernel", "by_split_kernel"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_long_sums_are_as_precise_as_float32(kernels: list[Any], kind: str) -> None:
    grads, x = drawn(kind)
    exact = grads.double().t() @ x.double()
    for dim in (0, 1):
        plain = off(grads.t() @ x, exact, dim)
        assert off(summed(grads, x), exact, dim) <= max(5e-7, 1.5 * plain)
    assert [name for name, _ in kernels] == ["look_kernel", "look_kernel", "outer_kernel"] * 2
    assert kernels[2][1][1] == 2  # shares


@pytest.mark.parametrize("kind", KINDS)
def test_one_look_serves_all_sums(kernels: list[Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "GROUP", 32)  # parts lie in several
    grads, x = drawn(kind)
    of_grads, of_x, exact = Rows(grads), Rows(x), grads.double()
    assert (of_grads.sum() - exact.sum(0)).abs().max() <= 5e-7 * exact.abs().sum(0).max()
    true, plain = exact.t() @ x.double(), grads.t() @ x
    for part in (slice(0, 64), slice(16, 80)):
        found = products.sum_outer(of_grads, of_x, part.start, part.stop)
        assert off(found, true[part], 1) <= max(5e-7, 1.5 * off(plain[part], true[part], 1))
    assert [name for name, _ in kernels] == ["look_kernel", "look_kernel", "outer_kernel", "outer_kernel"]


@pytest.mark.parametrize(("steps", "gates", "inputs"), [(64, 64, 64), (1111, 80, 96), (70, 144, 64)])
def test_edges_of_tiles(kernels: list[Any], steps: int, gates: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    around, x = (torch.randn(steps, width, generator=generator) for width in (gates + 32, inputs))
    grads, weights = around[:, :gates], torch.randn(gates, inputs, generator=generator)
    wide = torch.full((steps, gates + 16), torch.nan)
    found = products.multiply(x, weights.t(), out=wide[:, :gates])
    assert off(found, x.double() @ weights.double().t(), 1) < 5e-7
    assert wide[:, gates:].isnan().all()
    sums = torch.full((gates + 8, inputs), torch.nan)
    found = products.sum_outer(Rows(around), Rows(x), 0, gates, out=sums[:gates])
    assert found.data_ptr() == sums.data_ptr()
    assert off(found, grads.double().t() @ x.double(), 1) < 5e-7
    assert sums[gates:].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_stays_in_its_row(kernels: list[Any]) -> None:
    grads, _ = drawn("normal", 100)
    grads[3, 5], grads[7, 0] = torch.nan, torch.inf
    found = products.multiply(grads, torch.ones(GATES, INPUTS))
    assert (found.isfinite().all(1) == torch.tensor([row not in (3, 7) for row in range(100)])).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_stays_in_its_column(kernels: list[Any]) -> None:
    grads, x = drawn("normal")
    exact = grads.double().t() @ x.double()
    grads[3, 5], grads[7, 70], x[1000, 9] = torch.nan, torch.inf, -torch.inf
    found, finite = summed(grads, x), torch.ones(GATES, INPUTS, dtype=torch.bool)
    finite[5], finite[70], finite[:, 9] = False, False, False
    assert (found.isfinite() == finite).all()
    assert (found - exact)[finite].abs().max() <= 1e-6 * exact.abs().max()
    assert (Rows(grads).sum().isfinite() == finite[:, 0]).all()


def test_small_or_crooked_products_are_torchs(kernels: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    grads, x = drawn("normal")
    summed(grads[:, :48], x)
    summed(torch.zeros(STEPS, 81)[:, 1:], x)
    summed(torch.zeros(GATES, STEPS).t(), x)
    products.multiply(x[:, :63], torch.zeros(63, 64))
    Rows(grads[:100]).sum()
    monkeypatch.setattr(products, "LEAST_SUMMED", STEPS * INPUTS * GATES + 1)
    summed(grads, x)
    assert not kernels
    measured = Rows(grads), Rows(x)
    for rows in measured:
        rows.most()
    products.sum_outer(*measured, 0, GATES)
    assert len(kernels) == 3


def test_where_triton_fails_torch_multiplies(kernels: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **constants: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(products, "launch", fails)
    monkeypatch.setattr(faults, "_broken", {})
    grads, x = drawn("normal")
    with pytest.warns(RuntimeWarning, match="product kernel cannot run.*C compiler"):
        found = summed(grads, x)
    assert off(found, grads.double().t() @ x.double(), 1) < 2e-6
    assert torch.equal(Rows(grads).sum(), grads.sum(0))


@pytest.mark.parametrize(("terms", "rows", "columns"), [(16384, 384, 128), (262144, 3072, 1024), (512, 64, 64)])
def test_shares_fill_the_processors_and_little_memory(terms: int, rows: int, columns: int) -> None:
    share = products.share_of(terms, rows, columns, products.LONG, 132)
    shares = -(-terms // share)
    assert share % products.BLOCK == 0
    assert shares * rows * columns <= products.MOST_PARTIAL
    programs, at_once = shares * products.LONG.programs(rows, columns), 132 * products.LONG.at_once
    assert terms == 512 or programs / (at_once * -(-programs // at_once)) > 0.7


def test_float32_on_large_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU:
        device, dtype = torch.device("cuda", 0), torch.float32

    monkeypatch.setattr(products, "has_triton", lambda: True)
    given: Any = OnGPU()
    for room in (99, 227):
        monkeypatch.setattr(products, "shared_room", lambda device, room=room: room << 10)
        assert products._can_run(given) is (room == 227)
    OnGPU.dtype = torch.float64
    assert not products._can_run(given)
