"""`chain_backward` against autograd, the Jacobians against autograd's, and the scan against the plain chain."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from zoo import difference

import timeloom as tl
from timeloom.bppsa import matrices, scan
from timeloom.bppsa.jacobians import LAYERS
from timeloom.bppsa.matrices import Dense, Sparse
from timeloom.bppsa.scan import ScanTrace, scan_backward

pytestmark = pytest.mark.usefixtures("one_thread")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pruned(layer: nn.Module, amount: float = 0.9) -> nn.Module:
    prune.l1_unstructured(layer, "weight", amount)
    return layer


def build(*layers: nn.Module) -> nn.Sequential:
    """Layers in float64 with weights from a seed."""
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=i + 1) / max(1, parameter[0].numel()) ** 0.5)
    return model


def convolutional(cut: bool) -> nn.Sequential:
    layers = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, bias=False),
        nn.Tanh(),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(24, 7),
        nn.ReLU(),
        nn.Linear(7, 5),
    ]
    model = build(*layers)
    for layer in layers if cut else []:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            pruned(layer)
    return model


CHAINS = {
    "convolutional": (lambda: convolutional(False), (2, 3, 17, 16)),
    "pruned": (lambda: convolutional(True), (2, 3, 17, 16)),
    "one of a batch": (lambda: convolutional(True), (1, 3, 17, 16)),
    "one layer": (lambda: build(nn.Linear(4, 3)), (5, 4)),
    "deep": (lambda: build(*[layer for _ in range(9) for layer in (nn.Linear(5, 5), nn.Tanh())]), (3, 5)),
    "nested": (
        lambda: build(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Sequential(nn.Sequential(nn.Linear(6, 2)))),
        (3, 4),
    ),
    "features behind positions": (lambda: build(nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2)), (2, 5, 4)),
    "flat from the start": (lambda: build(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(inplace=True)), (2, 3, 4)),
    "in place": (lambda: build(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), (3, 4)),
    "no parameters": (lambda: build(nn.Tanh(), nn.AvgPool2d(2)), (2, 3, 6, 6)),
    "grouped": (
        lambda: build(nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2), nn.Tanh()),
        (2, 4, 7, 8),
    ),
    "depthwise, same": (
        lambda: build(nn.Conv2d(3, 6, 4, padding="same", dilation=2, groups=3), nn.ReLU()),
        (2, 3, 9, 8),
    ),
    "valid": (lambda: build(nn.Conv2d(2, 3, 3, padding="valid"), nn.Flatten(), nn.Linear(48, 2)), (2, 2, 6, 6)),
    "max windows": (lambda: build(nn.MaxPool2d(3, stride=2, padding=1, dilation=1, ceil_mode=True)), (2, 3, 8, 7)),
    "dilated windows": (lambda: build(nn.MaxPool2d((2, 3), stride=(1, 2), dilation=(2, 1))), (2, 3, 8, 7)),
    "mean windows": (lambda: build(nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True)), (2, 3, 8, 7)),
    "means without padding": (
        lambda: build(nn.AvgPool2d((3, 2), stride=2, padding=1, ceil_mode=True, count_include_pad=False)),
        (2, 3, 8, 7),
    ),
    "sums": (lambda: build(nn.AvgPool2d(2, divisor_override=1)), (2, 3, 8, 8)),
    "all weights zero": (lambda: _zeros(), (2, 4)),
}


def _zeros() -> nn.Sequential:
    model = build(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    nn.init.zeros_(model[2].weight)
    return model


def squares(y: Tensor) -> Tensor:
    return ((y - 0.3) ** 2 * torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {"x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize("levels", [None, 0, 1, 2])
@pytest.mark.parametrize("chain", CHAINS)
def test_gradients_are_autograds(chain: str, levels: int | None) -> None:
    make, shape = CHAINS[chain]
    model, x = make(), draw(*shape).requires_grad_()
    twin, y = make(), draw(*shape).requires_grad_()
    value = tl.chain_backward(model, x, squares, levels)
    expected = squares(twin(y))
    expected.backward()
    assert difference(value, expected) < 1e-13
    assert not value.requires_grad
    for (name, result), wanted in zip(gradients(model, x).items(), gradients(twin, y).values(), strict=True):
        assert difference(result, wanted) < 1e-12, name


@pytest.mark.parametrize("chain", CHAINS)
def test_jacobians_are_autograds(chain: str) -> None:
    """Each layer's, entry by entry; and nothing that is zero is stored."""
    make, shape = CHAINS[chain]
    point = draw(*shape)
    for layer in make().modules():
        if isinstance(layer, nn.Sequential):
            continue
        with torch.no_grad():
            out = layer(point.clone())
            jacobian = LAYERS[type(layer)](layer, point, out)
        if jacobian is not None:
            dense = jacobian.to_dense() if isinstance(jacobian, Sparse) else jacobian
            for i in range(len(point)):
                exact = torch.autograd.functional.jacobian(lambda p, f=layer: f(p.clone()), point[i : i + 1])
                exact = exact.reshape(out[0].numel(), point[0].numel()).t()
                assert difference(dense.values[min(i, len(dense.values) - 1)], exact) < 1e-14
        if isinstance(jacobian, Sparse):
            assert bool((jacobian.matrix.values() != 0).all())
        point = out


windows = st.fixed_dictionaries(
    {"kernel_size": st.tuples(st.integers(1, 3), st.integers(1, 3)), "stride": st.tuples(*[st.integers(1, 3)] * 2)}
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    conv=windows,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.sampled_from([1, 2]),
    pool=windows,
    kind=st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]),
    ceil=st.booleans(),
    size=st.tuples(st.integers(8, 11), st.integers(8, 11)),
)
def test_windows_of_any_kind(
    conv: dict[str, tuple[int, int]],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    pool: dict[str, tuple[int, int]],
    kind: type[nn.Module],
    ceil: bool,
    size: tuple[int, int],
) -> None:
    convolution = nn.Conv2d(2, 4, **conv, padding=padding, dilation=dilation, groups=groups)
    pad = tuple(k // 2 for k in pool["kernel_size"])
    model = build(nn.Tanh(), convolution, kind(**pool, padding=pad, ceil_mode=ceil), nn.Tanh())
    x = draw(2, 2, *size).requires_grad_()
    expected = torch.autograd.grad(squares(model(x)), [x, *model.parameters()])
    tl.chain_backward(model, x, squares)
    for found, wanted in zip([x.grad, *(p.grad for p in model.parameters())], expected, strict=True):
        assert difference(found, wanted) < 1e-12


def test_pruned_layers_are_sparse_and_dense_ones_are_not() -> None:
    x = draw(2, 40)
    for layer, kind in ((nn.Linear(40, 30), Dense), (pruned(nn.Linear(40, 30)), Sparse)):
        jacobian = LAYERS[nn.Linear](layer, x, x[:, :30])
        assert isinstance(jacobian, kind)
        assert jacobian.shape == (40, 30)
    assert jacobian.stored == 2 * 120
    image = draw(1, 4, 8, 8)
    conv = nn.Conv2d(4, 4, 3, padding=1)
    full = LAYERS[nn.Conv2d](conv, image, image)
    assert full.stored == 4 * 4 * (3 * 8 - 2) ** 2
    assert LAYERS[nn.Conv2d](pruned(conv), image, image).stored < 0.13 * full.stored


def random_matrices(sizes: list[int], batch: int) -> list[Dense | Sparse]:
    """A chain of matrices of all kinds: shared and not, dense and sparse."""
    made: list[Dense | Sparse] = []
    for i, (columns, rows) in enumerate(itertools.pairwise(sizes)):
        values = draw(1 if i % 4 == 1 else batch, rows, columns, seed=i) / columns**0.5
        if i % 3 != 2:
            made.append(Dense(values))
            continue
        values = values.expand(batch, -1, -1) * (draw(batch, rows, columns, seed=100 + i) > 1)
        b, r, c = values.nonzero(as_tuple=True)
        made.append(Sparse.of(b * rows + r, b * columns + c, values[b, r, c], (rows, columns), batch))
    return made


@pytest.mark.parametrize("levels", [None, 0, 1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 23])
def test_the_scan_is_the_chain(count: int, levels: int | None) -> None:
    sizes = [3 + (5 * i) % 7 for i in range(count + 1)]
    jacobians, gradient = random_matrices(sizes, 2), draw(2, sizes[0], seed=50)
    found, trace = scan_backward(gradient, jacobians, levels)
    expected = [gradient]
    for jacobian in jacobians:
        dense = jacobian.to_dense().values if isinstance(jacobian, Sparse) else jacobian.values
        expected.append(torch.einsum("brc,bc->br", dense.expand(2, -1, -1), expected[-1]))
    assert len(found) == count + 1
    for result, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-14)
    assert all(operation.kind == "matvec" for operation in trace.operations if operation.phase != "up")
    if levels == 0 or count < 2:
        assert [operation.kind for operation in trace.operations] == ["matvec"] * count
        assert trace.critical_flops == trace.serial_flops


@pytest.mark.parametrize("count", [1, 2, 6, 7, 8, 15, 30])
def test_the_scan_is_as_short_as_a_tree(count: int) -> None:
    """Two products a level at most, nothing in the middle, and no product that nobody asked for."""
    jacobians = random_matrices([4] * (count + 1), 1)
    _, trace = scan_backward(draw(1, 4), jacobians)
    assert len(trace.steps()) <= 2 * math.ceil(math.log2(count + 2)) - 1
    assert not any(operation.phase == "middle" for operation in trace.operations)
    assert len(trace.operations) <= 2 * count
    _, hybrid = scan_backward(draw(1, 4), jacobians, levels=1)
    assert {operation.phase for operation in hybrid.operations} <= {"up", "middle", "down"}
    assert all(operation.level == 1 for operation in hybrid.operations)


def test_no_identity_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product is one of the given matrices or of products of them: with eight matrices of eight different
    sizes, each operand's sizes tell where in the chain it stands.
    """
    sizes = list(range(2, 11))
    seen: list[tuple[int, int]] = []

    def watch(left: Dense, right: Dense | Tensor) -> Dense | Tensor:
        begin = right.shape[0] if isinstance(right, Dense) else right.shape[1]
        assert left.shape[1] == begin
        assert left.shape[0] > left.shape[1]
        seen.append(left.shape)
        return original[isinstance(right, Dense)](left, right)

    original = {True: matrices.compose, False: matrices.apply}
    monkeypatch.setattr(scan, "compose", watch)
    monkeypatch.setattr(scan, "apply", watch)
    scan_backward(draw(1, 2), [Dense(draw(1, r, c)) for c, r in itertools.pairwise(sizes)])
    assert len(seen) > 8


def test_flops_are_counted_as_they_are_made() -> None:
    """Against a count over the dense matrices' entries that are not zero."""
    for left, right in zip(random_matrices([6] * 6, 2), random_matrices([6] * 7, 2)[1:], strict=False):
        dense = [m.to_dense().values if isinstance(m, Sparse) else m.values.expand(2, -1, -1) for m in (left, right)]
        stored = [
            (d != 0).double() if isinstance(m, Sparse) else torch.ones_like(d)
            for d, m in zip(dense, (left, right), strict=True)
        ]
        assert matrices.compose_flops(left, right) == float(2 * (stored[0] @ stored[1]).sum() / 2)
        assert matrices.apply_flops(left) == float(2 * stored[0].sum() / 2)
        product = matrices.compose(left, right)
        product = product.to_dense() if isinstance(product, Sparse) else product
        torch.testing.assert_close(product.values.expand(2, -1, -1), dense[0] @ dense[1])


@pytest.mark.parametrize("most", [1, 7, 100])
def test_large_products_are_made_in_pieces(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    multiply = torch.sparse.mm

    def watched(left: Tensor, right: Tensor) -> Tensor:
        calls.append(len(left))
        return multiply(left, right)

    monkeypatch.setattr(torch.sparse, "mm", watched)
    empty = torch.zeros(2, 5, dtype=torch.float64)
    empty[1, 3] = 2.0  # rows without entries, at the beginning and at the end
    (other,) = [one for one in random_matrices([5, 5, 5, 5], 2) if isinstance(one, Sparse)][:1]
    for left, right in ((Sparse.diagonal(empty), other), (other, Sparse.diagonal(empty)), (other, other)):
        monkeypatch.setattr(matrices, "MOST_PRODUCTS", 2**28)
        whole = matrices.compose(left, right)
        calls.clear()
        monkeypatch.setattr(matrices, "MOST_PRODUCTS", most)
        pieces = matrices.compose(left, right)
        assert sum(calls) == left.batch * left.shape[0]
        assert min(calls) > 0
        assert len(calls) > 1 or matrices.compose_flops(left, right) * left.batch / 2 < most
        dense = [one.to_dense().values if isinstance(one, Sparse) else one.values for one in (whole, pieces)]
        torch.testing.assert_close(dense[1], dense[0], rtol=0, atol=0)


def test_the_trace_tells_the_critical_path() -> None:
    traces: list[ScanTrace] = []
    model, x = convolutional(True), draw(2, 3, 17, 16)
    tl.chain_backward(model, x, squares, record=traces.append)
    tl.chain_backward(model, x, squares, levels=0, record=traces.append)
    full, plain = traces
    assert plain.critical_flops == plain.total_flops == plain.serial_flops == full.serial_flops
    assert full.critical_flops < full.total_flops
    assert len(full.steps()) < len(plain.steps())


def test_float32_and_gradients_that_add_up() -> None:
    model = convolutional(False).float()
    twin = copy.deepcopy(model)
    x, target = draw(4, 3, 17, 16).float(), torch.tensor([0, 4, 2, 1])
    for _ in range(2):
        tl.chain_backward(model, x, lambda y: F.cross_entropy(y, target))
        F.cross_entropy(twin(x), target).backward()
    for result, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert result.grad.dtype == torch.float32
        assert difference(result.grad, wanted.grad) < 1e-5


def test_gradients_flow_on_into_what_made_x_and_into_the_loss() -> None:
    scale, shift = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.7, 0.2))
    model, x = build(nn.Linear(4, 3), nn.Tanh()), draw(2, 4)
    tl.chain_backward(model, x * scale, lambda y: squares(y + shift))
    expected = torch.autograd.grad(squares(model(x * scale) + shift), (scale, shift))
    assert difference(scale.grad, expected[0]) < 1e-13
    assert difference(shift.grad, expected[1]) < 1e-13


def test_frozen_layers_get_nothing_and_cost_nothing() -> None:
    model, x = convolutional(False), draw(2, 3, 17, 16)
    traces: list[ScanTrace] = []
    tl.chain_backward(model, x, squares, record=traces.append)
    model.zero_grad()
    for layer in model[:4]:
        layer.requires_grad_(False)
    tl.chain_backward(model, x, squares, record=traces.append)
    assert model[0].weight.grad is None
    assert model[3].weight.grad is None
    assert model[7].weight.grad is not None
    assert len(traces[1].serial) == 2
    assert len(traces[0].serial) == 8


def test_a_layer_that_is_not_supported_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.LayerNorm(3)))
    with pytest.raises(
        TypeError,
        match=r"layer 1\.1, LayerNorm.*Linear, Conv2d, ReLU, Tanh, MaxPool2d, AvgPool2d, BatchNorm1d, BatchNorm2d, "
        r"Flatten",
    ):
        tl.chain_backward(model, torch.ones(2, 3), torch.sum)

    class Doubled(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(TypeError, match="layer 0, Doubled"):
        tl.chain_backward(nn.Sequential(Doubled()), torch.ones(2, 3), torch.sum)
    with pytest.raises(ValueError, match="padding_mode='zeros' only, got Conv2d"):
        tl.chain_backward(
            nn.Sequential(nn.Conv2d(1, 1, 3, padding_mode="reflect", padding=1)), torch.ones(2, 1, 4, 4), torch.sum
        )
    with pytest.raises(ValueError, match=r"batch of images \(B, C, H, W\) at Conv2d.*got shape \(1, 4, 4\)"):
        tl.chain_backward(nn.Sequential(nn.Conv2d(1, 1, 3)), torch.ones(1, 4, 4), torch.sum)
    with pytest.raises(ValueError, match="flattens it"):
        tl.chain_backward(nn.Sequential(nn.Flatten(0)), torch.ones(2, 3), torch.sum)


def test_bad_input() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"nn\.Sequential, a chain of layers, got Linear"):
        tl.chain_backward(nn.Linear(3, 2), x, torch.sum)
    with pytest.raises(ValueError, match="model has no layers"):
        tl.chain_backward(nn.Sequential(), x, torch.sum)
    with pytest.raises(TypeError, match="x must be a Tensor"):
        tl.chain_backward(model, [1.0], torch.sum)
    with pytest.raises(TypeError, match=r"float32 or float64, got torch\.int64"):
        tl.chain_backward(model, x.long(), torch.sum)
    with pytest.raises(ValueError, match=r"shape \(B, \.\.\.\) with B ≥ 1, got \(3,\)"):
        tl.chain_backward(model, x[0], torch.sum)
    with pytest.raises(TypeError, match="loss must be a function"):
        tl.chain_backward(model, x, torch.zeros(()))
    with pytest.raises(ValueError, match=r"scalar tensor, got shape \(2, 2\)"):
        tl.chain_backward(model, x, torch.square)
    with pytest.raises(ValueError, match="does not depend on y"):
        tl.chain_backward(model, x, lambda y: torch.zeros(()))
    with pytest.raises(ValueError, match="levels must be a whole number"):
        tl.chain_backward(model, x, torch.sum, levels=-1)


def test_a_layer_in_two_places_counts_twice() -> None:
    torch.manual_seed(0)
    activation, shared = nn.Tanh(), nn.Linear(4, 4, dtype=torch.float64)
    model = nn.Sequential(shared, activation, nn.Sequential(shared, activation), nn.Linear(4, 1, dtype=torch.float64))
    twin, x = copy.deepcopy(model), draw(3, 4)
    value = tl.chain_backward(model, x, lambda y: y.square().sum())
    expected = twin(x).square().sum()
    expected.backward()
    assert float(value) == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert difference(ours.grad, theirs.grad) < 1e-12


def test_what_is_not_a_plain_chain_is_refused() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    with pytest.raises(TypeError, match="Residual with a forward of its own"):
        tl.chain_backward(Residual(nn.Linear(4, 4)), torch.randn(2, 4), torch.sum)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_hook(lambda module, given, out: 2 * out)
    with pytest.raises(TypeError, match="a forward hook changes what"):
        tl.chain_backward(model, torch.randn(2, 4), torch.sum)


def test_hooks_may_watch() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []
    model[1].register_forward_hook(lambda module, given, out: seen.append(out.shape))
    tl.chain_backward(model, torch.randn(2, 4), torch.sum)
    assert seen


def test_windows_wholly_in_the_padding_are_constants() -> None:
    """They are -inf. (Torch's own backward pass writes through an index that is none, so it is not asked.)"""
    model = build(nn.MaxPool2d(2, stride=2, padding=1, dilation=(2, 1)), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2))
    x = draw(3, 2, 1, 4).requires_grad_()
    value = tl.chain_backward(model, x, lambda y: y.square().sum())
    constant = -torch.ones(3, 6, dtype=torch.float64)
    expected = model[3](constant).square().sum()
    assert difference(value, expected.detach()) < 1e-12
    parameters = (model[3].weight, model[3].bias)
    for parameter, grad in zip(parameters, torch.autograd.grad(expected, parameters), strict=True):
        assert difference(parameter.grad, grad) < 1e-12
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_autocast_is_for_the_loss_alone() -> None:
    model = build(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).float()
    x, target = draw(5, 4).float(), torch.arange(5) % 3
    F.cross_entropy(model(x), target).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        tl.chain_backward(model, x, lambda y: F.cross_entropy(y, target))
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert difference(parameter.grad, grad) < 1e-6


def test_gradients_that_are_off_and_layers_of_two_results_are_named() -> None:
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(RuntimeError, match=r"needs gradients, and torch.no_grad\(\) or inference_mode"):
            tl.chain_backward(nn.Sequential(nn.Tanh()), x, Tensor.sum)
    with pytest.raises(ValueError, match=r"layer 0, MaxPool2d.*returns indices"):
        tl.chain_backward(nn.Sequential(nn.MaxPool2d(2, return_indices=True)), x, Tensor.sum)


def _normed() -> nn.Sequential:
    """Convolutions with BatchNorms whose running statistics are not those of a fresh layer."""
    layers = (
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, affine=False), nn.Tanh(), nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 5),
    )  # fmt: skip
    model = build(*layers)
    for _ in range(3):
        model(draw(4, 2, 8, 8, seed=9) + 0.3)
    return model


@pytest.mark.parametrize("levels", [None, 0, 1])
@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_in_both_modes(training: bool, levels: int | None) -> None:
    """Gradients are autograd's, and so are the running statistics: a step counts once."""
    model = _normed().train(training)
    twin = copy.deepcopy(model)
    x, other = (draw(5, 2, 8, 8).requires_grad_() for _ in range(2))
    target = torch.tensor([0, 1, 2, 3, 4])
    traces: list[ScanTrace] = []
    value = tl.chain_backward(model, x, lambda y: F.cross_entropy(y, target), levels, traces.append)
    expected = F.cross_entropy(twin(other), target)
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    assert x.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-10, atol=1e-13)
    for mine, true in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, true.grad, rtol=1e-10, atol=1e-13)
    for (name, mine), (_, true) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(mine, true), name
    steps = traces[0].steps()
    assert len(traces[0].serial) == 10  # Flatten is none
    if not training and levels is None:
        assert len(steps) < 10
    assert all(layer.track_running_stats for layer in model if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d))


def test_batch_norm_without_running_statistics_uses_the_batch() -> None:
    model = build(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.ReLU(), nn.Linear(3, 2)).eval()
    twin, x = copy.deepcopy(model), draw(6, 4)
    tl.chain_backward(model, x, lambda y: y.square().sum())
    twin(x).square().sum().backward()
    for mine, true in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, true.grad, rtol=1e-10, atol=1e-13)
