"""Products of split matrices: the accuracy of float32, on a CPU that stands in for the tensor cores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from timeloom.kernels.cuda import split


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "_pays", lambda *_: True)
    monkeypatch.setattr(split, "_added_up", lambda left, right: left.float() @ right.float())
    monkeypatch.setattr(split, "SHORT_SUM", 64)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_as_accurate_as_in_float32(bias: bool) -> None:
    left, right, added = drawn(37, 50), drawn(50, 19, seed=1), drawn(19, seed=2) if bias else None
    exact = left.double() @ right.double() + (0 if added is None else added.double())
    assert off(split.product(left, right, added), exact) < 3e-7
    assert off(left.half().float() @ right.half().float(), left.double() @ right.double()) > 1e-4


@pytest.mark.parametrize("size", [1e-25, 1e-6, 1e6, 1e20])
def test_rows_and_columns_of_any_size_keep_it(size: float) -> None:
    left, right = drawn(8, 30), drawn(30, 6, seed=1)
    left[2] *= size
    right[:, 3] *= 1 / size
    exact = left.double() @ right.double()
    found = split.product(left, right)
    for row in range(8):
        for column in range(6):
            scale = float(left[row].double().norm() * right[:, column].double().norm())
            assert abs(float(found[row, column]) - float(exact[row, column])) <= 1e-6 * scale


@pytest.mark.parametrize("terms", [1, 63, 64, 200, 1000])
def test_sums_of_outer_products(terms: int) -> None:
    grads, values = drawn(terms, 12), drawn(terms, 7, seed=1)
    values[:, 2] *= 1e8
    exact = grads.double().t() @ values.double()
    found = split.sum_outer(grads, values)
    assert found.shape == (12, 7)
    for column in range(7):
        assert off(found[:, column], exact[:, column]) < 1e-6


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    left, right = torch.zeros(4, 5), drawn(5, 3)
    assert bool((split.product(left, right) == 0).all())
    left[1, 2] = float("nan")
    found = split.product(left, right)
    assert bool(found[1].isnan().all())
    assert bool((found[0] == 0).all())
