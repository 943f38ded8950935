"""The scan's Triton kernels against the plain loop in float64.

They run through Triton's interpreter, on a CPU; `TRITON_INTERPRET=0` runs them on a GPU, with some larger cases.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products of matrices on a GPU

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import timeloom as tl
from timeloom.scan import cpu, gpu, reference
from timeloom.scan import elements as el
from timeloom.scan.elements import Structure

pytest.importorskip("triton")

COMPILED = os.environ["TRITON_INTERPRET"] == "0"
DEVICE = "cuda" if COMPILED else "cpu"
pytestmark = pytest.mark.skipif(COMPILED and not torch.cuda.is_available(), reason="TRITON_INTERPRET=0 needs a GPU")
not_a_number = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # by the interpreter
on_gpu = pytest.mark.skipif(not COMPILED, reason="needs a GPU and TRITON_INTERPRET=0")

WAYS = list(itertools.product([False, True], repeat=2))
"""Reverse, transpose."""
CLOSE = {torch.float32: 4e-6, torch.float64: 1e-13}
"""Relative to the largest value; the sums of matrices are long."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles, chunks and thresholds for which a few steps are many."""
    sizes = {"THREADS": 16, "LENGTH": 4, "ROWS": (8, 8, 16), "WINDOW": 2, "PROCESSORS": 6, "TILES": 2, "ALONE": 3}
    sizes |= {"SHORT": 1, "ENTRIES": (64, 128), "LEAST": 3, "SERIAL": 7, "WHOLE": 4, "COLUMNS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(gpu, name, value)


@pytest.fixture
def by_kernels(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes the kernels, wherever the tensors are."""
    monkeypatch.setattr(cpu, "supports", lambda b: False)
    monkeypatch.setattr(gpu, "supports", lambda b, structure: True)


@pytest.fixture(autouse=True)
def unwritten_is_nan() -> Iterator[None]:
    """Deterministic mode fills `torch.empty` with NaN: an output that no program writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(
    structure: Structure, steps: int, batch: tuple[int, ...], n: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Elements that neither vanish nor explode, sources and a start."""
    generator = torch.Generator().manual_seed(steps + n)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if structure == "diagonal":
        drawn = random(steps, *batch, n).tanh(), random(steps, *batch, n), random(*batch, n)
    elif structure == "dense":
        a = 0.98 * torch.linalg.qr(random(steps, *batch, n, n)).Q
        drawn = a, random(steps, *batch, n), random(*batch, n)
    else:
        angle = random(steps, *batch, n)
        rows = [torch.stack([angle.cos(), angle.sin()], -2), torch.stack([-angle.sin(), angle.cos()], -2)]
        drawn = 0.98 * torch.stack(rows, -3), random(steps, *batch, 2, n), random(*batch, 2, n)
    a, b, h0 = (tensor.to(DEVICE, dtype) for tensor in drawn)
    return a, b, h0


def truth(
    a: Tensor, b: Tensor, h0: Tensor, structure: Structure, reverse: bool = False, transpose: bool = False
) -> Tensor:
    """The plain loop in float64 on the CPU, in operations that autograd knows."""
    a, b, h0 = (tensor.cpu().double() for tensor in (a, b, h0))
    a = el.transpose(a, structure) if transpose else a
    if reverse:
        return reference.scan(a.flip(0), b.flip(0), h0, structure).flip(0)
    return reference.scan(a, b, h0, structure)


def incoming(h: Tensor) -> Tensor:
    """Gradients that come in, the same on every run."""
    return torch.randn(h.shape, generator=torch.Generator().manual_seed(0)).to(h)


def check(given: Tensor, expected: Tensor, close: float | None = None) -> None:
    close = CLOSE[given.dtype] if close is None else close
    given, expected = given.cpu(), expected.cpu()
    size = float(expected.nan_to_num().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(given.double(), expected, rtol=0.0, atol=close * size, equal_nan=True)


DIAGONAL = [  # steps, batch, n: walks alone, chunks of one tile and of two, windows of them; ragged ends of all kinds
    (1, (), 1), (9, (2,), 1), (3, (1,), 2), (35, (2,), 7), (64, (12,), 1), (16, (), 11), (129, (2,), 5), (65, (3,), 3),
    (130, (5,), 5),
    (140, (1,), 1), (70, (2,), 1), (70, (1,), 3), (190, (), 2), (299, (3,), 1), (180, (1,), 4), (700, (), 1),
]  # fmt: skip


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("steps", "batch", "n"), DIAGONAL)
def test_diagonal(steps: int, batch: tuple[int, ...], n: int, reverse: bool) -> None:
    a, b, h0 = draw("diagonal", steps, batch, n)
    check(gpu.scan(a, b, h0, "diagonal", reverse), truth(a, b, h0, "diagonal", reverse))


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("steps", "batch", "n"), [(5, (2,), 3), (70, (2,), 1)])
def test_without_a_start(steps: int, batch: tuple[int, ...], n: int, reverse: bool) -> None:
    a, b, h0 = draw("diagonal", steps, batch, n)
    leaves = [tensor.requires_grad_() for tensor in (a, b)]
    given = tl.linear_scan(*leaves, reverse=reverse)
    expected = truth(*leaves, torch.zeros_like(h0), "diagonal", reverse)
    check(given.detach(), expected.detach())
    weight = incoming(given)
    found = torch.autograd.grad(given, leaves, weight)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, weight.cpu().double()), strict=True):
        check(one, other.double())


@pytest.mark.usefixtures("small")
def test_sizes_cover_every_kind_of_tiling() -> None:
    tilings = {gpu._tiling(steps, n * (batch[0] if batch else 1), torch.float32) for steps, batch, n in DIAGONAL}
    assert {tiling.lanes * tiling.groups for tiling in tilings} == {16, 32}
    assert {tiling.lanes for tiling in tilings} == {1, 2, 4}
    assert {tiling.length for tiling in tilings} >= {1, 4}
    assert {tiling.tiles > 2 for tiling in tilings if tiling.chunks == 1} == {False, True}, "walked alone"
    windows = {(tiling.tiles, -(-tiling.chunks // gpu.WINDOW)) for tiling in tilings if tiling.chunks > 1}
    assert windows >= {(1, 2), (1, 3), (2, 2), (2, 3)}, "tiles that are kept and that are read again, and who tells"


@pytest.mark.usefixtures("small")
def test_every_run_gives_the_same_bits() -> None:
    """Whatever tile was first: none looks at more or fewer of those before it."""
    a, b, h0 = draw("diagonal", 129, (2,), 5)
    assert torch.equal(gpu.scan(a, b, h0, "diagonal"), gpu.scan(a, b, h0, "diagonal"))


MATRICES: list[tuple[Structure, int, tuple[int, ...], int]] = [
    ("dense", 1, (2,), 3), ("dense", 7, (), 2), ("dense", 8, (1,), 4), ("dense", 25, (2,), 3), ("dense", 9, (), 16),
    ("dense", 40, (2,), 1), ("dense", 9, (1, 2), 9), ("dense", 9, (), 20),
    ("dense", 10, (), 32), ("block", 1, (), 1), ("block", 9, (3,), 1),
    ("block", 25, (2,), 3), ("block", 22, (2, 1), 5),
]  # fmt: skip


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("structure", "steps", "batch", "n"), MATRICES)
def test_matrices(structure: Structure, steps: int, batch: tuple[int, ...], n: int) -> None:
    a, b, h0 = draw(structure, steps, batch, n)
    for reverse, transpose in WAYS:
        given = gpu.scan(a, b, h0, structure, reverse, transpose)
        check(given, truth(a, b, h0, structure, reverse, transpose))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("structure", ["diagonal", "dense", "block"])
def test_double_precision(structure: Structure) -> None:
    a, b, h0 = draw(structure, 37, (2,), 3, torch.float64)
    check(gpu.scan(a, b, h0, structure), truth(a, b, h0, structure))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("structure", ["diagonal", "dense", "block"])
def test_half_precision_rounds_once(structure: Structure, dtype: torch.dtype) -> None:
    """Every state is the float32 one, rounded: errors do not add up over time."""
    a, b, h0 = draw(structure, 70, (2,), 3, dtype)
    given, expected = gpu.scan(a, b, h0, structure), truth(a, b, h0, structure)
    assert given.dtype == dtype
    roundings = 1.01 if dtype == torch.bfloat16 and not COMPILED else 0.51  # Triton's interpreter cuts digits off
    torch.testing.assert_close(given.cpu().double(), expected, rtol=roundings * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("steps", "batch", "n"), [(1, (), 1), (35, (2,), 7), (65, (3,), 3), (9, (2,), 1), (190, (), 2), (299, (3,), 1)]
)
def test_gradients_of_diagonal_scans(steps: int, batch: tuple[int, ...], n: int, reverse: bool) -> None:
    leaves = [tensor.requires_grad_() for tensor in draw("diagonal", steps, batch, n)]
    given = tl.linear_scan(*leaves, reverse)
    expected = truth(*leaves, "diagonal", reverse)
    weight = incoming(given)
    found = torch.autograd.grad(given, leaves, weight)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, weight.cpu().double()), strict=True):
        check(one, other.double())


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("structure", ["dense", "block"])
def test_gradients_of_matrices(structure: Structure) -> None:
    for reverse, transpose in WAYS:
        leaves = [tensor.requires_grad_() for tensor in draw(structure, 23, (2,), 3)]
        given = tl.linear_scan(*leaves, reverse, transpose=transpose, structure=structure)
        expected = truth(*leaves, structure, reverse, transpose)
        weight = incoming(given)
        found = torch.autograd.grad(given, leaves, weight)
        for one, other in zip(found, torch.autograd.grad(expected, leaves, weight.cpu().double()), strict=True):
            check(one, other.double())


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision(dtype: torch.dtype) -> None:
    leaves = [tensor.requires_grad_() for tensor in draw("diagonal", 50, (2,), 3, dtype)]
    given = tl.linear_scan(*leaves)
    found = torch.autograd.grad(given, leaves, torch.ones_like(given))
    doubled = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(truth(*doubled, "diagonal").sum(), doubled)
    for one, other in zip(found, expected, strict=True):  # a state or a gradient is rounded, and then their product
        assert one.dtype == dtype
        torch.testing.assert_close(one.cpu().double(), other, rtol=1.6 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.usefixtures("by_kernels")
def test_only_what_asks_gets_a_gradient() -> None:
    for asking in range(3):
        inputs = [tensor.requires_grad_(i == asking) for i, tensor in enumerate(draw("diagonal", 20, (1,), 3))]
        tl.linear_scan(*inputs).sum().backward()
        assert [tensor.grad is not None for tensor in inputs] == [i == asking for i in range(3)]


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("structure", ["diagonal", "dense", "block"])
def test_derivatives_of_both_orders(structure: Structure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "THREADS", 4)  # many scans of few steps
    for reverse, transpose in ((False, True), (True, False)):
        inputs = tuple(tensor.requires_grad_() for tensor in draw(structure, 8, (1,), 2, torch.float64))

        def run(a: Tensor, b: Tensor, h0: Tensor, reverse: bool = reverse, transpose: bool = transpose) -> Tensor:
            return tl.linear_scan(a, b, h0, reverse, transpose=transpose, structure=structure)

        assert gradcheck(run, inputs, fast_mode=True)
        assert gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.usefixtures("small")
def test_growth_and_exact_zeros() -> None:
    a, b, h0 = draw("diagonal", 70, (1,), 3)
    a[20:40] *= 3
    a[5], a[50, 0, 0], a[16:18, 0, 1] = 0.0, 0.0, 0.0
    for reverse in (False, True):
        check(gpu.scan(a, b, h0, "diagonal", reverse), truth(a, b, h0, "diagonal", reverse))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@not_a_number
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("structure", ["diagonal", "dense", "block"])
def test_products_that_overflow_leave_zeros_alone(structure: Structure) -> None:
    """A state that is zero stays zero while elements grow without bound; one that is reset, too."""
    a, b, h0 = draw(structure, 70, (2,), 3)
    a *= 1e4
    b[:67], h0[0] = 0.0, 0.0
    a[5] = 0.0
    expected = truth(a, b, h0, structure)
    assert bool((expected[5:67] == 0).all())
    given = gpu.scan(a, b, h0, structure)
    assert torch.equal(given[5:67].cpu().double(), expected[5:67])
    for part in (slice(5), slice(67, None)):
        check(given[part], expected[part])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@not_a_number
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("steps", "lanes"), [(190, 2), (129, 10)])
def test_an_element_of_zero_ends_a_product_that_overflows(steps: int, lanes: int) -> None:
    """What is behind it does not depend on what was before, if the states were finite, and no chunk overflows alone."""
    a, b, h0 = draw("diagonal", steps, (), lanes)
    a[4:60], a[100], b[:101] = 8.0, 0.0, 0.0  # 8 ** 56 is too large for float32
    h0 *= 1e-20
    expected = truth(a, b, h0, "diagonal")
    assert bool(expected.isfinite().all())
    check(gpu.scan(a, b, h0, "diagonal")[100:], expected[100:])


@not_a_number
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("lanes", [5, 13])
def test_nan_keeps_to_its_lane_and_to_what_comes_behind(lanes: int) -> None:
    a, b, h0 = draw("diagonal", 70, (), lanes)
    b[33, 2], a[20, 4], b[40, 1] = torch.nan, torch.nan, torch.inf
    b[:24, 0], h0[0], a[24, 0] = 0.0, 0.0, torch.nan  # the state that it meets is zero
    leaves = [tensor.requires_grad_() for tensor in (a, b, h0)]
    h, expected = tl.linear_scan(*leaves), truth(*leaves, "diagonal")
    assert bool((h.isnan().cpu() == expected.isnan()).all())
    check(h[:, 3].detach(), expected[:, 3].detach())
    check(h[:20].detach(), expected[:20].detach())
    grads = torch.autograd.grad(h, leaves, torch.ones_like(h))
    for one, other in zip(grads, torch.autograd.grad(expected.sum(), leaves), strict=True):
        check(one[..., 3], other[..., 3].double())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("structure", ["dense", "block"])
def test_nan_keeps_to_its_row(structure: Structure) -> None:
    a, b, h0 = draw(structure, 30, (3,), 3)
    b[12, 1, 0] = torch.nan
    h = gpu.scan(a, b, h0, structure)
    expected = truth(a, b, h0, structure)
    assert bool((h.isnan().cpu() == expected.isnan()).all())
    assert bool(h[12:, 1].isnan().any())
    check(h[:, (0, 2)], expected[:, (0, 2)])


@not_a_number
@pytest.mark.usefixtures("small")
def test_infinity_is_not_turned_into_nan_by_padding() -> None:
    a, b, h0 = torch.ones(12, 3, 3, device=DEVICE), torch.zeros(12, 3, device=DEVICE), torch.ones(3, device=DEVICE)
    b[2, 0] = torch.inf
    assert torch.equal(gpu.scan(a, b, h0, "dense").cpu().double(), truth(a, b, h0, "dense"))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("steps", "lanes"), [(35, 14), (70, 2), (70, 3), (180, 4)])  # alone, kept tiles and read again
def test_nothing_outside_of_the_tensors_is_touched(
    steps: int, lanes: int, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor of a launch lies between walls of NaN, which no result sees and no program writes into."""
    launch, wall = gpu.launch, 40

    def walled(kernel: Any, grid: Any, tensors: tuple[Tensor | None, ...], *more: Any, **constants: Any) -> None:
        rooms = []
        for tensor in tensors:
            beyond = torch.nan if tensor is not None and tensor.is_floating_point() else 9
            rooms.append(None if tensor is None else tensor.new_full((2 * wall + tensor.numel(),), beyond))
        inside = [None if room is None else room[wall:-wall] for room in rooms]
        for tensor, values in zip(tensors, inside, strict=True):
            if tensor is not None and values is not None:
                values.copy_(tensor.flatten())
        launch(kernel, grid, tuple(inside), *more, **constants)
        for tensor, room, values in zip(tensors, rooms, inside, strict=True):
            if tensor is not None and room is not None and values is not None:
                tensor.copy_(values.view(tensor.shape))
                walls = torch.cat([room[:wall], room[-wall:]])
                assert bool((walls.isnan() if tensor.is_floating_point() else walls == 9).all())

    monkeypatch.setattr(gpu, "launch", walled)
    a, b, h0 = draw("diagonal", steps, (), lanes)
    states, leaves = gpu.scan(a, b, h0, "diagonal", reverse), [a.double().cpu().requires_grad_(), b.double().cpu()]
    expected = truth(leaves[0], leaves[1].requires_grad_(), h0, "diagonal", reverse)
    check(states, expected.detach())
    weight = incoming(states)
    exact = torch.autograd.grad(expected, leaves, weight.cpu().double())
    adjoint, d_a = gpu.diagonal_adjoint(a, weight, h0, states, reverse, True)
    assert d_a is not None
    for one, other in zip((d_a, adjoint), exact, strict=True):
        check(one, other)


@pytest.mark.usefixtures("small")
def test_strided_inputs_are_left_alone() -> None:
    a, b, h0 = draw("diagonal", 30, (4,), 6)
    a, b, h0 = a[::2, :, ::2], b.transpose(0, 1)[:, ::2].transpose(0, 1)[..., 1::2], h0[:, 3:]
    copies = [tensor.clone() for tensor in (a, b, h0)]
    check(gpu.scan(a, b, h0, "diagonal"), truth(a, b, h0, "diagonal"))
    for tensor, copy in zip((a, b, h0), copies, strict=True):
        assert torch.equal(tensor, copy)
    a, b, h0 = draw("dense", 30, (2,), 3)
    check(gpu.scan(a.mT, b, h0, "dense", True, True), truth(a, b, h0, "dense", True))


@pytest.mark.usefixtures("by_kernels")
def test_nothing_at_all() -> None:
    for shape in ((0, 2, 3), (5, 0, 3), (5, 2, 0)):
        a, b, h0 = (torch.zeros(s, device=DEVICE, requires_grad=True) for s in (shape, shape, shape[1:]))
        h = tl.linear_scan(a, b, h0)
        assert h.shape == shape
        h.sum().backward()
        for leaf in (a, b, h0):
            assert leaf.grad is not None
            assert bool((leaf.grad == 0).all())
        dense = torch.zeros(*shape, shape[-1], device=DEVICE)
        assert tl.linear_scan(dense, b, h0).shape == shape


def test_only_what_fits_the_kernels_is_theirs() -> None:
    b = torch.zeros(4, 2, 33)
    assert not gpu.supports(b, "diagonal")  # on a CPU
    assert gpu.supports(b.to("meta"), "diagonal") is False
    if COMPILED:
        b = b.cuda()
        assert gpu.supports(b, "diagonal")
        assert gpu.supports(b, "block")
        assert not gpu.supports(b, "dense")
        assert gpu.supports(b[..., :32], "dense")
        assert not gpu.supports(b.to(torch.complex64), "diagonal")


@pytest.mark.parametrize("dtype", gpu.DTYPES)
@pytest.mark.parametrize("lanes", [1, 3, 8, 32, 100, 511, 512, 4096, 20000, 3_000_000])
@pytest.mark.parametrize("steps", [1, 100, 4097, 1 << 20])
def test_every_size_is_covered_by_its_tiles(steps: int, lanes: int, dtype: torch.dtype) -> None:
    wide, groups, length, tiles, chunks = gpu._tiling(steps, lanes, dtype)
    rows = groups * length * tiles
    assert (chunks - 1) * rows < steps <= chunks * rows
    assert wide * dtype.itemsize <= gpu.ROWS[2]
    assert 32 <= wide * groups <= 2 * gpu.THREADS
    for size in (wide, groups, length):
        assert size & (size - 1) == 0


LARGE: list[tuple[Structure, int, tuple[int, ...], int]] = [
    ("diagonal", 1000, (1,), 1), ("diagonal", 70_000, (1,), 1), ("diagonal", 70_001, (2,), 17),
    ("diagonal", 9_999, (3,), 100), ("diagonal", 5_000, (7,), 77), ("diagonal", 2_000, (64,), 300),
    ("diagonal", 3_000, (1,), 4096),
    ("dense", 5_000, (2,), 4), ("dense", 30_000, (1,), 8), ("dense", 700, (5,), 13),
    ("dense", 3_000, (16,), 20), ("dense", 9_000, (1,), 32), ("block", 20_000, (3,), 50),
]  # fmt: skip


@on_gpu
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("structure", "steps", "batch", "n"), LARGE)
def test_real_tiles(structure: Structure, steps: int, batch: tuple[int, ...], n: int, reverse: bool) -> None:
    """Values and gradients with the sizes of tiles that users get, against compiled code in float64 on the CPU."""
    leaves = [tensor.requires_grad_() for tensor in draw(structure, steps, batch, n)]
    doubled = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    given = tl.linear_scan(*leaves, reverse, structure=structure)
    expected = tl.linear_scan(*doubled, reverse, structure=structure)
    check(given.detach(), expected.detach(), 1e-5)
    weight = incoming(given)
    found = torch.autograd.grad(given, leaves, weight)
    exact = torch.autograd.grad(expected, doubled, weight.cpu().double())
    for one, other in zip(found, exact, strict=True):
        check(one, other, 1e-5)


@on_gpu
def test_addresses_beyond_32_bits() -> None:
    steps, lanes = (1 << 21) + 100, 1024
    a = torch.full((steps, lanes), 0.5, device=DEVICE, dtype=torch.bfloat16)
    b = torch.ones_like(a)
    b[-50:] = 2.0
    h = tl.linear_scan(a, b)
    assert bool((h[100:-50] == 2.0).all())
    assert bool((h[-30:] == 4.0).all())


@on_gpu
@pytest.mark.parametrize("structure", ["diagonal", "dense", "block"])
def test_replayed_from_a_graph(structure: Structure) -> None:
    a, b, h0 = draw(structure, 6000, (2,), 5)
    expected = tl.linear_scan(a, b, h0, structure=structure)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h = tl.linear_scan(a, b, h0, structure=structure)
    graph.replay()
    assert torch.equal(h, expected)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize(("levels", "name"), [(None, "linear scan"), (2, "blelloch scan"), (30, "blelloch scan")])
@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_gradients_by_a_scan_of_jacobians(kind: str, levels: int | None, name: str) -> None:
    """BPPSA's network, 20 units: the kernels where no levels are asked for, the tree where they are."""
    steps, n = (300, 20) if COMPILED else (24, 5)
    torch.manual_seed(0)
    solver = tl.solvers.Shooting(adjoint="scan", adjoint_levels=levels)
    layer = getattr(tl, kind)(3, n, solver=solver, dtype=torch.float64, device=DEVICE)
    true = getattr(torch.nn, kind)(3, n, dtype=torch.float64, device=DEVICE)
    true.load_state_dict(layer.state_dict())
    for loss in (lambda y, h: h.sum(), lambda y, h: y.square().mean() + h.sum()):
        x = torch.randn(steps, 2, 3, dtype=torch.float64, device=DEVICE)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for net, given in zip((layer, true), inputs, strict=True):
            net.zero_grad()
            loss(*net(given)).backward()
        assert layer.reports[0].backward is not None
        assert layer.reports[0].backward.solver == name
        pairs = [
            (inputs[0].grad, inputs[1].grad),
            *((p.grad, q.grad) for p, q in zip(layer.parameters(), true.parameters(), strict=True)),
        ]
        for mine, expected in pairs:
            assert mine is not None
            assert expected is not None
            check(mine, expected.double().cpu(), 1e-9)
