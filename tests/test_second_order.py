"""Gradients of gradients, parallel in time, and many gradients at once: against float64 loops on autograd's tape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad, gradcheck, gradgradcheck

import timeloom as tl
from timeloom.solve import second_order
from timeloom.solvers import Shooting

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]
CHUNKS = Shooting(chunk=4)
LAYERS = {"gru": ("GRU", {}), "lstm": ("LSTM", {}), "rnn": ("RNN", {}), "projected": ("LSTM", {"proj_size": 2})}
each_layer = pytest.mark.parametrize("name", LAYERS)
B, D, H = 2, 3, 3


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks in short sequences."""
    monkeypatch.setattr(second_order, "SHORTEST_CHUNK", 3)
    monkeypatch.setattr(second_order, "WARMUP", 2)
    monkeypatch.setattr(second_order.math, "isqrt", lambda _: 3, raising=True)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(name: str, solver: Any = CHUNKS, **options: Any) -> tuple[nn.RNNBase, nn.RNNBase]:
    """Timeloom's layer, and torch's with the same weights."""
    kind, more = LAYERS[name]
    torch.manual_seed(0)
    theirs = getattr(nn, kind)(D, H, dtype=torch.float64, **more, **options)
    ours = getattr(tl, kind)(D, H, dtype=torch.float64, solver=solver, **more, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def hidden(layer: nn.RNNBase) -> list[Tensor]:
    stacked = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = (layer.proj_size or H, H) if isinstance(layer, nn.LSTM) else (H,)
    return [0.5 * draw(stacked, B, width, seed=3 + i) for i, width in enumerate(widths)]


def twice(layer: nn.RNNBase, steps: int = 11, **given: Any) -> list[Tensor]:
    """First-order gradients, and the gradients of a function of all of them."""
    x = draw(steps, B, D, seed=1).requires_grad_()
    hx = [part.requires_grad_() for part in hidden(layer)]
    y, last = layer(x, tuple(hx) if len(hx) > 1 else hx[0], **given)
    loss = (y * draw(*y.shape, seed=5)).sin().sum()
    loss = loss + sum(
        (part * draw(*part.shape, seed=6)).sum() for part in (last if isinstance(last, tuple) else (last,))
    )
    live = [x, *hx, *layer.parameters()]
    first = grad(loss, live, create_graph=True)
    mixed = sum((one * draw(*one.shape, seed=7 + i)).cos().sum() for i, one in enumerate(first))
    return [*(one.detach() for one in first), *grad(mixed, live)]


def assert_all_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-9) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@each_layer
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_as_torchs_layer(name: str, options: dict[str, Any], short_chunks: None) -> None:
    ours, theirs = pair(name, **options)
    assert_all_close(twice(ours), twice(theirs))


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_short_sequences(kind: str, steps: int, short_chunks: None) -> None:
    ours, theirs = pair(kind.lower())
    assert_all_close(twice(ours, steps), twice(theirs, steps))


@each_layer
def test_lengths_and_resets(name: str, short_chunks: None) -> None:
    """Against the loop over single steps, cut and put back by hand."""
    ours, theirs = pair(name)
    steps, lengths = 9, torch.tensor([9, 5])
    resets = torch.zeros(steps, B, dtype=torch.bool)
    resets[4, 0] = resets[2, 1] = resets[0, 1] = True

    class Loop(nn.Module):
        num_layers, bidirectional, proj_size = 1, False, theirs.proj_size

        def forward(self, x: Tensor, hx: Any) -> Any:
            pair = isinstance(hx, tuple)
            state, outputs, last = hx, [], hx
            for t in range(steps):
                mark, inside = resets[t].view(1, B, 1), (t < lengths).view(1, B, 1)
                state = (
                    tuple(torch.where(mark, o, s) for s, o in zip(state, hx, strict=True))
                    if pair
                    else torch.where(mark, hx, state)
                )
                y, state = theirs(x[t : t + 1], state)
                outputs.append(torch.where(inside, y, 0))
                keep = zip(state, last, strict=True) if pair else [(state, last)]
                last = tuple(torch.where(inside, new, old) for new, old in keep)
                last = last if pair else last[0]
            return torch.cat(outputs), last

    loop = Loop()
    loop.__class__ = type("Loop", (Loop, nn.LSTM if isinstance(theirs, nn.LSTM) else nn.Module), {})
    loop.parameters = theirs.parameters  # type: ignore[method-assign]
    assert_all_close(twice(ours, steps, lengths=lengths, resets=resets), twice(loop, steps))


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_gradcheck_and_gradgradcheck(kind: str, short_chunks: None) -> None:
    layer = getattr(tl, kind)(1, 2, dtype=torch.float64, solver=CHUNKS)
    given = (draw(7, 1, 1, seed=1).requires_grad_(), *layer.parameters())

    def outputs(x: Tensor, *_: Tensor) -> Tensor:
        return layer(x)[0]

    assert gradcheck(outputs, given)
    assert gradgradcheck(outputs, given, atol=1e-4)


class Cell(nn.Module):
    """A state of two parts, weights of its own, and one that is made from another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(0.5 * draw(H, H, seed=8)), nn.Parameter(draw(H, seed=9))

    def forward(self, state: Any, x: Tensor) -> Any:
        h, c = state
        c = torch.sigmoid(x + self.scale) * c + torch.tanh(h @ (2 * self.weight) + x)
        return torch.tanh(c) * self.scale, c


@pytest.mark.parametrize("solver", ["deer", "shooting", CHUNKS, "auto"])
def test_a_cell_of_ones_own(solver: Any, short_chunks: None) -> None:
    found = []
    for way in (solver, "sequential"):
        cell = Cell()
        xs, h0 = draw(13, B, H, seed=1).requires_grad_(), (draw(B, H, seed=2).requires_grad_(), draw(B, H, seed=3))
        (h, c), _ = tl.unroll(cell, h0, xs, solver=way)
        live = [xs, h0[0], *cell.parameters()]
        first = grad((h.sin() + c.square()).sum(), live, create_graph=True)
        found.append([*first, *grad(sum((one**3).sum() for one in first), live)])
    assert_all_close(*found, tolerance=1e-7)


def test_a_penalty_on_gradients_trains_as_torchs(short_chunks: None) -> None:
    curves = []
    for layer in pair("gru"):
        optimiser, curve = torch.optim.SGD(layer.parameters(), lr=0.1), []
        for number in range(5):
            x = draw(12, B, D, seed=number).requires_grad_()
            loss = layer(x)[0].square().mean()
            (slope,) = grad(loss, x, create_graph=True)
            total = loss + 100 * slope.square().sum()
            optimiser.zero_grad()
            total.backward()
            optimiser.step()
            curve.append(float(total.detach()))
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_many_gradients_at_once(name: str, short_chunks: None) -> None:
    results = []
    for layer in pair(name):
        x = draw(7, B, D, seed=1).requires_grad_()
        y, _ = layer(x)
        many = draw(4, *y.shape, seed=2)
        live = (x, layer.weight_hh_l0)
        if isinstance(layer, tl.GRU | tl.LSTM):
            results.append(grad(y, live, many, is_grads_batched=True))
        else:
            rows = [grad(y, live, one, retain_graph=True) for one in many]
            results.append([torch.stack(parts) for parts in zip(*rows, strict=True)])
    assert_all_close(*results)


def test_a_vectorised_jacobian(short_chunks: None) -> None:
    from torch.autograd.functional import jacobian

    ours, _ = pair("gru")
    x = draw(5, 1, D)
    found = jacobian(lambda x: ours(x)[0], x, vectorize=True)
    expected = jacobian(lambda x: ours(x)[0], x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    x.requires_grad_()
    y = ours(x)[0]
    rows = torch.func.vmap(lambda one: grad(y, x, one, retain_graph=True)[0])(
        torch.eye(y.numel()).double().view(-1, *y.shape)
    )
    torch.testing.assert_close(rows.view_as(expected), expected, rtol=1e-9, atol=1e-12)


def test_a_third_gradient_is_refused(short_chunks: None) -> None:
    ours, _ = pair("rnn")
    x = draw(5, B, D).requires_grad_()
    (first,) = grad(ours(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated twice, not three times.*solver='sequential'"):
        grad(first.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_single_precision_in_the_layers_own_kernels(kind: str) -> None:
    """A long sequence by `auto`, whose kernels run a whole layer: torch's float64 numbers, to float32's rounding."""
    torch.manual_seed(0)
    ours = getattr(tl, kind)(D, H)
    theirs = getattr(nn, kind)(D, H).double()
    theirs.load_state_dict(ours.state_dict())
    found = []
    for layer in (ours, theirs):
        x = draw(1500, 1, D, seed=1).to(layer.weight_ih_l0.dtype).requires_grad_()
        (slope,) = grad(layer(x)[0].square().sum(), x, create_graph=True)
        found.append(
            [part.detach().double() for part in (slope, *grad(slope.square().sum(), [x, *layer.parameters()]))]
        )
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-5
    assert "torch" not in ours.reports[0].reason


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
@pytest.mark.parametrize("around", ["first", "second"])
def test_autocast_around_the_backward_passes_rounds_nothing(kind: str, around: str) -> None:
    torch.manual_seed(0)
    layer = getattr(tl, kind)(D, H, num_layers=2, solver=CHUNKS)
    x = draw(11, B, D, seed=1).float().requires_grad_()
    live = [x, *layer.parameters()]

    def gradients(inside: str) -> list[Tensor]:
        loss = layer(x)[0].square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside == "first"):
            first = grad(loss, live, create_graph=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside == "second"):
            second = grad(torch.stack([one.square().sum() for one in first]).sum(), live)
        return [*(one.detach() for one in first), *second]

    for one, other in zip(gradients(around), gradients("neither"), strict=True):
        assert torch.equal(one, other)
