"""Products of many rows by the kernel of row_products.cu, emulated on a CPU, against float64."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from emulator import COMPILER, library
from nvrtc_layout import same_layout
from torch import Tensor

from timeloom.kernels import faults
from timeloom.kernels.cuda import nvrtc, products, row_products
from timeloom.kernels.cuda.programs import RowProductsArgs, headers
from timeloom.kernels.cuda.row_products import COLUMNS, ROWS, TERMS, THREADS, Variant

emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
compiled = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no NVRTC: {nvrtc.unavailable()}")
ENTRY = """
alignas(128) unsigned char shared[{shared}];
extern "C" const char *emulate(const RowProductsArgs *a, int blocks, int in_reverse) {{
  for (unsigned char &byte : shared) byte = 0xff;
  return emulated::run(blocks, {threads}, in_reverse, [a] {{ multiply_rows(*a); }});
}}
"""


@cache
def _library(variant: Variant) -> ctypes.CDLL:
    made = library(variant.source + ENTRY.format(shared=variant.shared_bytes, threads=THREADS), headers())
    made.emulate.restype = ctypes.c_char_p
    return made


@pytest.fixture(params=[False, True], ids=["in order", "in reverse"])
def kernel(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Variant]:
    """The kernel runs on CPU tensors; what it was compiled for."""
    launches: list[Variant] = []

    def function(device: int, variant: Variant) -> Any:
        def launch(blocks: int, args: RowProductsArgs) -> None:
            failure = _library(variant).emulate(ctypes.byref(args), blocks, request.param)
            assert failure is None, failure.decode()
            launches.append(variant)

        return launch

    monkeypatch.setattr(row_products, "function", function)
    monkeypatch.setattr(row_products, "can_run", lambda a, b: a.stride(1) == 1)
    monkeypatch.setattr(row_products, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(row_products, "processors", lambda index: 1)
    return launches


def drawn(rows: int, terms: int, columns: int, kind: str = "normal") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, weights = torch.randn(rows, terms, generator=generator), torch.randn(columns, terms, generator=generator)
    if kind == "one sign":
        a, weights = a.abs(), weights.abs()
    if kind == "rows apart":
        a *= torch.logspace(0, -30, rows).unsqueeze(1)
    if kind == "columns apart":
        weights *= torch.logspace(10, -10, columns).unsqueeze(1)
    if kind == "with zeros":
        a[:, ::2], a[3], weights[5] = 0, 0, 0
    return a * {"tiny": 1e-35, "huge": 1e30}.get(kind, 1.0), weights, torch.linspace(-1, 1, columns)


def off(found: Tensor, exact: Tensor, dim: int) -> float:
    """Relative to the largest value of each row, or column."""
    return float(((found - exact).abs() / exact.abs().amax(dim, keepdim=True).clamp(min=1e-300)).max())


@emulated
@pytest.mark.parametrize("kind", ["normal", "one sign", "rows apart", "columns apart", "with zeros", "tiny", "huge"])
def test_as_precise_as_float32(kernel: list[Variant], kind: str) -> None:
    a, weights, _ = drawn(140, 64, 48, kind)
    for matrix in (weights.t(), weights.t().contiguous()):
        found, exact, plain = products.multiply(a, matrix), a.double() @ weights.double().t(), a @ weights.t()
        for dim in (0, 1):
            assert off(found, exact, dim) <= max(5e-7, 1.5 * off(plain, exact, dim))
    assert [variant.by_terms for variant in kernel] == [True, False]


@emulated
@pytest.mark.parametrize(
    ("rows", "terms", "columns"),
    [(1, 1, 1), (130, 7, 33), (129, 33, 6), (300, 32, 96), (64, 100, 64), (150, 40, 130), (20, 64, 260)],
)
def test_any_size(kernel: list[Variant], rows: int, terms: int, columns: int) -> None:
    a, weights, bias = drawn(rows, terms, columns)
    more = torch.linspace(3, 1, columns // 2 + 1)
    both = bias.double()
    both[: len(more)] += more.double()
    exact = a.double() @ weights.double().t() + both
    wide = torch.full((rows, columns + 5), torch.nan)
    for matrix in (weights.t(), weights.t().contiguous()):
        assert off(products.multiply(a, matrix, bias, more), exact, 1) < 1e-6
        found = products.multiply(a, matrix, bias, more, out=wide[:, :columns])
        assert found.data_ptr() == wide.data_ptr()
        assert off(found, exact, 1) < 1e-6
        assert wide[:, columns:].isnan().all()
        assert off(products.multiply(a, matrix), exact - both, 1) < 1e-6
    assert len(kernel) == 6


@emulated
def test_rows_that_lie_apart(kernel: list[Variant]) -> None:
    """Views into wider matrices, whose rows are or are not aligned."""
    a, weights, _ = drawn(60, 24, 32)
    exact = a.double() @ weights.double().t()
    for first, more in ((4, 8), (1, 3)):
        wide = torch.full((60, 24 + more), torch.nan)
        wide[:, first : first + 24] = a
        assert off(products.multiply(wide[:, first : first + 24], weights.t()), exact, 1) < 5e-7
    assert [variant.aligned for variant in kernel] == [True, False]


@emulated
def test_what_is_not_finite_stays_in_its_row_or_column(kernel: list[Variant]) -> None:
    a, weights, _ = drawn(100, 40, 32)
    exact = a.double() @ weights.double().t()
    a[3, 5], a[7, 0], weights[9, 1], weights[30, 39] = torch.nan, torch.inf, -torch.inf, torch.nan
    finite = torch.ones(100, 32, dtype=torch.bool)
    finite[[3, 7]], finite[:, [9, 30]] = False, False
    for matrix in (weights.t(), weights.t().contiguous()):
        found = products.multiply(a, matrix)
        assert torch.equal(found.isfinite(), finite)
        assert (found - exact)[finite].abs().max() <= 1e-6 * exact.abs().max()


def test_where_the_kernel_cannot_run_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise nvrtc.CompileError("no NVRTC")

    monkeypatch.setattr(row_products, "can_run", lambda a, b: True)
    monkeypatch.setattr(row_products, "multiply", fails)
    monkeypatch.setattr(faults, "_broken", {})
    a, weights, bias = drawn(50, 8, 6)
    with pytest.warns(RuntimeWarning, match="product kernel cannot run.*no NVRTC"):
        found = products.multiply(a, weights.t(), bias, bias[:2])
    torch.testing.assert_close(found, a @ weights.t() + bias + torch.cat([bias[:2], torch.zeros(4)]))


def test_tiles_fit_the_layers() -> None:
    assert [row_products.columns_of(columns) for columns in (1, 32, 64, 96, 192, 384, 1536)] == [
        32, 32, 64, 96, 96, 128, 128,
    ]  # fmt: skip


@compiled
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("by_terms", [True, False])
def test_it_compiles(columns: int, by_terms: bool) -> None:
    for fast in (True, False):
        variant = Variant(columns, by_terms, fast, fast)
        same = same_layout("RowProductsArgs", RowProductsArgs, "c", "rows", "c_stride")
        same += f"static_assert(ROWS == {ROWS} && TERMS == {TERMS} && 32 * WARPS == {THREADS});\n"
        same += f"static_assert(2 * HALVES * 2 + 2 * (ROWS + COLUMNS) * 4 == {variant.shared_bytes});\n"
        for architecture in ("sm_80", "sm_90"):
            assert b"multiply_rows" in nvrtc.compile_source(variant.source + same, architecture, headers())
