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
from timeloom.kernels.cuda import product_kernels, products
from timeloom.kernels.cuda.products import Tile

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="for Triton's interpreter")

SMALL = Tile(32, 32, 32, 4, 3)
STEPS, INPUTS, GATES = 1200, 64, 80
KINDS = ("normal", "fading", "one sign", "tiny", "huge", "columns apart")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels run, of whatever size; their launches."""
    launches: list[Any] = []

    def noted(kernel: Any, grid: tuple[int, int, int], *given: Any, **constants: Any) -> None:
        launches.append((kernel, grid))
        products_launch(kernel, grid, *given, **constants)

    products_launch = products.launch
    monkeypatch.setattr(products, "launch", noted)
    monkeypatch.setattr(products, "_can_run", lambda x: True)
    monkeypatch.setattr(products, "_processors", lambda x: 8)
    monkeypatch.setattr(products, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(products, "LEAST_TERMS", 0)
    monkeypatch.setattr(products, "WIDE", SMALL)
    monkeypatch.setattr(products, "LONG", SMALL)
    return launches


def drawn(kind: str, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Gate gradients `(steps, GATES)` and inputs `(steps, INPUTS)`."""
    generator = torch.Generator().manual_seed(0)
    grads, x = (torch.randn(steps, width, generator=generator) for width in (GATES, INPUTS))
    if kind == "fading":
        grads *= torch.logspace(0, -6, steps).unsqueeze(1)
    if kind == "one sign":
        grads, x = grads.abs(), x.abs()
    if kind == "columns apart":
        x *= torch.logspace(4, -4, INPUTS)
    return grads * {"tiny": 1e-30, "huge": 1e30}.get(kind, 1.0), x


def off(found: Tensor, exact: Tensor, dim: int) -> float:
    """Relative to the largest value of each row, or column."""
    return float(((found - exact).abs() / exact.abs().amax(dim, keepdim=True)).max())


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_rows_are_as_precise_as_float32(kernels: list[Any], kind: str) -> None:
    grads, x = drawn(kind, 100)
    weights = torch.randn(GATES, INPUTS, generator=torch.Generator().manual_seed(1)) / 8
    bias = torch.linspace(-1, 1, GATES)
    u, d_x = products.multiply(x, weights.t(), bias), products.multiply(grads, weights)
    exact_u, exact_d_x = torch.addmm(bias.double(), x.double(), weights.double().t()), grads.double() @ weights.double()
    assert off(u, exact_u, 1) <= max(5e-7, 1.5 * off(torch.addmm(bias, x, weights.t()), exact_u, 1))
    assert off(d_x, exact_d_x, 1) <= max(5e-7, 1.5 * off(grads @ weights, exact_d_x, 1))
    assert len(kernels) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_long_sums_are_as_precise_as_float32(kernels: list[Any], kind: str) -> None:
    grads, x = drawn(kind)
    exact = grads.double().t() @ x.double()
    for dim in (0, 1):
        plain = off(grads.t() @ x, exact, dim)
        assert off(products.sum_outer(grads, x), exact, dim) <= max(5e-7, 1.5 * plain)
    assert kernels[0][1][1] == 2  # shares
    exact = grads.double().sum(0)
    assert (products.sum_rows(grads) - exact).abs().max() <= 5e-7 * grads.double().abs().sum(0).max()
    assert kernels[-1][0] is product_kernels.column_sums_kernel


@pytest.mark.parametrize(("steps", "gates", "inputs"), [(64, 64, 64), (1111, 80, 96), (70, 144, 64)])
def test_edges_of_tiles(kernels: list[Any], steps: int, gates: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    around, x = (torch.randn(steps, width, generator=generator) for width in (gates + 32, inputs))
    grads, weights = around[:, :gates], torch.randn(gates, inputs, generator=generator)
    wide = torch.full((steps, gates + 16), torch.nan)
    found = products.multiply(x, weights.t(), out=wide[:, :gates])
    assert off(found, x.double() @ weights.double().t(), 1) < 5e-7
    assert wide[:, gates:].isnan().all()
    summed = torch.full((gates + 8, inputs), torch.nan)
    found = products.sum_outer(grads, x, out=summed[:gates])
    assert found.data_ptr() == summed.data_ptr()
    assert off(found, grads.double().t() @ x.double(), 1) < 5e-7
    assert summed[gates:].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_stays_in_its_row(kernels: list[Any]) -> None:
    grads, _ = drawn("normal", 100)
    grads[3, 5], grads[7, 0] = torch.nan, torch.inf
    found = products.multiply(grads, torch.ones(GATES, INPUTS))
    assert (found.isfinite().all(1) == torch.tensor([row not in (3, 7) for row in range(100)])).all()


def test_small_or_crooked_products_are_torchs(kernels: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    grads, x = drawn("normal")
    products.sum_outer(grads[:, :48], x)
    products.sum_outer(torch.zeros(STEPS, 81)[:, 1:], x)
    products.multiply(x[:, :63], torch.zeros(63, 64))
    products.sum_rows(grads[:100])
    monkeypatch.setattr(products, "LEAST_TERMS", STEPS * INPUTS * GATES + 1)
    products.sum_outer(grads, x)
    assert not kernels


def test_where_triton_fails_torch_multiplies(kernels: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **constants: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(products, "launch", fails)
    monkeypatch.setattr(faults, "_broken", {})
    grads, x = drawn("normal")
    with pytest.warns(RuntimeWarning, match="product kernel cannot run.*C compiler"):
        found = products.sum_outer(grads, x)
    assert off(found, grads.double().t() @ x.double(), 1) < 2e-6
    assert torch.equal(products.sum_rows(grads), grads.sum(0))


@pytest.mark.parametrize(("terms", "rows", "columns"), [(16384, 384, 128), (262144, 3072, 1024), (512, 64, 64)])
def test_shares_fill_the_processors_and_little_memory(terms: int, rows: int, columns: int) -> None:
    share = products.share_of(terms, rows, columns, products.LONG, 132)
    shares = -(-terms // share)
    assert share % products.LONG.terms == 0
    assert shares * rows * columns <= products.MOST_PARTIAL
    programs, at_once = shares * products.LONG.programs(rows, columns), 132 * products.LONG.at_once
    assert terms == 512 or programs / (at_once * -(-programs // at_once)) > 0.7


def test_who_does_not_let_cudnn_round_gets_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU:
        device, dtype = torch.device("cuda", 0), torch.float32

    monkeypatch.setattr(products, "shared_room", lambda device: 227 << 10)
    monkeypatch.setattr(products, "has_triton", lambda: True)
    given: Any = OnGPU()
    for rounds in (True, False):
        monkeypatch.setattr(products.tf32, "cudnn_rounds", lambda rounds=rounds: rounds)
        assert products._can_run(given) is rounds
