"""Elements, methods and directions of `linear_scan`, the associative scan, and the damped scan, against plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import timeloom as tl
from timeloom.kernels.cpu import build as kernels
from timeloom.scan import blelloch, cpu, elements, reference
from timeloom.scan.associative import associative_scan
from timeloom.scan.kalman import damped_scan

pytestmark = pytest.mark.usefixtures("one_thread")

STRUCTURES = ("diagonal", "dense", "block")
METHODS = ("auto", "reference", "chunked", "blelloch")


def problem(structure: str, steps: int, batch: tuple[int, ...] = (2,), n: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Elements that neither vanish nor explode, sources and a start."""
    generator = torch.Generator().manual_seed(steps)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if structure == "diagonal":
        return 0.9 * random(steps, *batch, n).tanh(), random(steps, *batch, n), random(*batch, n)
    if structure == "dense":
        return 0.98 * torch.linalg.qr(random(steps, *batch, n, n)).Q, random(steps, *batch, n), random(*batch, n)
    angle, shrink = random(steps, *batch, n), 0.98
    rows = [torch.stack([angle.cos(), angle.sin()], -2), torch.stack([-angle.sin(), angle.cos()], -2)]
    return shrink * torch.stack(rows, -3), random(steps, *batch, 2, n), random(*batch, 2, n)


def loop(a: Tensor, b: Tensor, h0: Tensor, structure: str, reverse: bool = False, transpose: bool = False) -> Tensor:
    """The recurrence as the documentation writes it."""
    products = {
        ("diagonal", False): "...i,...i->...i",
        ("diagonal", True): "...i,...i->...i",
        ("dense", False): "...ij,...j->...i",
        ("dense", True): "...ji,...j->...i",
        ("block", False): "...ijn,...jn->...in",
        ("block", True): "...jin,...jn->...in",
    }
    h, states = h0, {}
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        h = torch.einsum(products[structure, transpose], a[t], h) + b[t]
        states[t] = h
    return torch.stack([states[t] for t in range(len(b))])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 129, 300])
def test_every_method_is_the_loop(steps: int, structure: str, method: str) -> None:
    a, b, h0 = problem(structure, steps)
    for reverse, transpose in itertools.product([False, True], repeat=2):
        given = tl.linear_scan(a, b, h0, reverse, transpose=transpose, structure=structure, method=method)
        expected = loop(a, b, h0, structure, reverse, transpose)
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)])
def test_any_batch(batch: tuple[int, ...], structure: str) -> None:
    a, b, h0 = problem(structure, 150, batch)
    for method in METHODS:
        given = tl.linear_scan(a, b, h0, structure=structure, method=method)
        torch.testing.assert_close(given, loop(a, b, h0, structure), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_truncated_trees(structure: str) -> None:
    """Any number of levels, more than there are steps for too."""
    for steps in (*range(1, 20), 100):
        a, b, h0 = problem(structure, steps, (1,))
        expected = reference.scan(a, b, h0, structure)
        for levels in (0, 1, 2, 3, 4, 20, None):
            given = blelloch.scan(a, b, h0, structure, levels)
            torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


def test_a_tree_multiplies_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices only on the way up, and no root: T − 1 pairs less the log T that end in the last element."""
    products: list[int] = []
    compose = elements.compose
    monkeypatch.setattr(
        blelloch,
        "compose",
        lambda later, earlier, structure: products.append(len(later)) or compose(later, earlier, structure),
    )
    a, b, h0 = problem("dense", 64, (1,))
    for levels, expected in ((None, [32, 16, 8, 4, 2]), (2, [32, 16]), (0, [])):
        products.clear()
        blelloch.scan(a, b, h0, "dense", levels)
        assert products == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_derivatives_of_both_orders(structure: str, method: str) -> None:
    for reverse, transpose in itertools.product([False, True], repeat=2):
        inputs = tuple(tensor.requires_grad_() for tensor in problem(structure, 5, (1,), 2))

        def run(a: Tensor, b: Tensor, h0: Tensor, reverse: bool = reverse, transpose: bool = transpose) -> Tensor:
            return tl.linear_scan(a, b, h0, reverse, transpose=transpose, structure=structure, method=method)

        assert gradcheck(run, inputs, fast_mode=True)
        assert gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 16, 17, 32, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_sizes(dtype: torch.dtype, n: int) -> None:
    """Sizes that are unrolled and sizes that are not, of both types, in every direction."""
    if kernels.unavailable() is not None:
        pytest.skip("no compiler")
    close = 1e-4 if dtype == torch.float32 else 1e-12
    for structure in STRUCTURES:
        a, b, h0 = (tensor.to(dtype) for tensor in problem(structure, 40, (3,), n))
        for reverse, transpose in itertools.product([False, True], repeat=2):
            expected = loop(a.double(), b.double(), h0.double(), structure, reverse, transpose)
            given = cpu.scan(a, b, h0, structure, reverse, transpose)
            torch.testing.assert_close(given.double(), expected, rtol=close, atol=close)


def test_compiled_with_any_strides() -> None:
    if kernels.unavailable() is not None:
        pytest.skip("no compiler")
    a, b, h0 = problem("dense", 30, (4,), 5)
    expected = loop(a, b, h0, "dense")
    for order in itertools.permutations(range(4)):
        shuffled = a.permute(order).contiguous().permute([order.index(i) for i in range(4)])
        torch.testing.assert_close(cpu.scan(shuffled, b, h0, "dense"), expected)
    added = torch.randn_like(b)
    pulled = b + torch.einsum("tbij,tbj->tbi", a, added)
    torch.testing.assert_close(cpu.scan(a, b, h0, "dense", added=added), loop(a, pulled, h0, "dense"))


def test_threads_share_without_meeting() -> None:
    before = torch.get_num_threads()
    for structure in STRUCTURES:
        given = problem(structure, 400, (7,), 32)
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(tl.linear_scan(*given, structure=structure))
        torch.set_num_threads(before)
        assert torch.equal(*results)


def test_half_precision_is_taken() -> None:
    a, b, h0 = (tensor.to(torch.bfloat16) for tensor in problem("dense", 200))
    given = tl.linear_scan(a, b, h0)
    assert given.dtype == torch.bfloat16
    expected = loop(a.double(), b.double(), h0.double(), "dense")
    assert float((given.double() - expected).abs().max() / expected.abs().max()) < 0.1


def test_bad_options_are_named() -> None:
    a, b, _ = problem("dense", 4)
    with pytest.raises(ValueError, match="structure must be one of 'diagonal', 'dense', 'block' or None; got 'full'"):
        tl.linear_scan(a, b, structure="full")
    with pytest.raises(ValueError, match="method must be one of"):
        tl.linear_scan(a, b, method="fast")
    with pytest.raises(ValueError, match="levels=2 goes with method='blelloch'; the method is 'auto'"):
        tl.linear_scan(a, b, levels=2)
    with pytest.raises(ValueError, match="levels must be a whole number ≥ 0 or None, got -1"):
        tl.linear_scan(a, b, method="blelloch", levels=-1)
    with pytest.raises(ValueError, match=r"it must be \(4, 2, 3\) \(diagonal\)$"):
        tl.linear_scan(a, b, structure="diagonal")
    with pytest.raises(ValueError, match=r"block elements need it to be \(T, ..., 2, n\)"):
        tl.linear_scan(a, b[:, :1], structure="block")
    with pytest.raises(ValueError, match=r"it must be \(4, 2, 2, 3\) \(block\)"):
        tl.linear_scan(a, b, structure="block")
    with pytest.raises(ValueError, match=r"\(dense\); for blocks of 2 × 2 give structure='block'$"):
        tl.linear_scan(*problem("block", 4))


# ---- the associative scan ------------------------------------------------------------------------------------------


def test_prefixes_of_a_composition_that_does_not_commute() -> None:
    def combine(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (later[0] @ earlier[0],)

    for steps in range(1, 40):
        a, _, _ = problem("dense", steps)
        (given,) = associative_scan(combine, (a,))
        product = torch.eye(3, dtype=torch.float64)
        for t in range(steps):
            product = a[t] @ product
            torch.testing.assert_close(given[t], product)


# ---- the damped scan -----------------------------------------------------------------------------------------------


def filtered(a: Tensor, b: Tensor, damping: float) -> Tensor:
    """A textbook Kalman filter for one sequence, dense `(T, n, n)` and `(T, n)`: predict, then look at b."""
    n = b.shape[1]
    mean, covariance, means = torch.zeros(n).double(), torch.zeros(n, n).double(), []
    for transfer, source in zip(a, b, strict=True):
        mean, covariance = transfer @ mean + source, transfer @ covariance @ transfer.T + torch.eye(n).double()
        gain = covariance @ torch.linalg.inv(covariance + torch.eye(n).double() / damping)
        mean, covariance = mean + gain @ (source - mean), covariance - gain @ covariance
        means.append(mean)
    return torch.stack(means)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("damping", [1e-3, 0.5, 30.0])
def test_the_damped_scan_is_a_kalman_filter(damping: float, structure: str) -> None:
    for steps in (1, 2, 9, 50):
        a, b, _ = problem(structure, steps, (1,))
        given, _ = damped_scan(a, b, torch.tensor([damping], dtype=torch.float64), structure)
        if structure == "dense":
            expected = filtered(a[:, 0], b[:, 0], damping)
        elif structure == "diagonal":
            expected = filtered(torch.diag_embed(a[:, 0]), b[:, 0], damping)
        else:  # each unit is a filter of its own
            units = [filtered(a[:, 0, :, :, i], b[:, 0, :, i], damping) for i in range(b.shape[-1])]
            expected = torch.stack(units, -1)
        torch.testing.assert_close(given[:, 0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_ends_of_damping(structure: str) -> None:
    """None is the recurrence itself, very much leaves only the sources; every sequence has its own."""
    a, b, h0 = problem(structure, 60, (2,))
    given, _ = damped_scan(a, b, torch.tensor([0.0, 1e9]).double(), structure)
    plain = loop(a, b, torch.zeros_like(h0), structure)
    torch.testing.assert_close(given[:, 0], plain[:, 0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(given[:, 1], b[:, 1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_damped_scan_goes_on_where_it_ended(structure: str) -> None:
    a, b, _ = problem(structure, 41)
    damping = torch.tensor([0.3, 2.0]).double()
    whole, _ = damped_scan(a, b, damping, structure)
    first, belief = damped_scan(a[:17], b[:17], damping, structure)
    rest, _ = damped_scan(a[17:], b[17:], damping, structure, belief)
    torch.testing.assert_close(torch.cat([first, rest]), whole, rtol=1e-11, atol=1e-12)


def test_damping_bounds_what_would_explode() -> None:
    a, b = torch.full((500, 1, 1), 3.0).double(), torch.ones(500, 1, 1).double()
    assert not math.isfinite(float(tl.linear_scan(a.float(), b.float()).abs().max()))
    damped, _ = damped_scan(a, b, torch.tensor([1.0]).double(), "diagonal")
    assert float(damped.abs().max()) < 2


def test_elements_too_large_for_a_filter_are_not_an_error() -> None:
    """Here 1 + c j rounds to a singular matrix; what cannot be told is not finite, and corrected by plain jumps."""
    a, b = torch.full((9, 1, 2, 2), 1e12, dtype=torch.float64), torch.ones(9, 1, 2, dtype=torch.float64)
    means, _ = damped_scan(a, b, torch.tensor([0.1], dtype=torch.float64), "dense")
    assert torch.equal(means[0], b[0])
    assert not bool(means[1:].isfinite().all())
