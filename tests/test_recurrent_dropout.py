"""Dropout inside the recurrence: variational, zoneout and weight drop, against plain loops with the same masks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import timeloom as tl
from timeloom.nn.draws import ones_by_chance
from timeloom.solvers import Shooting

EXACT = torch.float64
LAYERS: dict[str, Any] = {"GRU": tl.GRU, "LSTM": tl.LSTM, "RNN": tl.RNN}
OPTIONS: dict[str, dict[str, Any]] = {
    "variational": {"recurrent_dropout": 0.4},
    "zoneout": {"zoneout": 0.3},
    "weights": {"weight_dropout": 0.5},
    "all": {"recurrent_dropout": 0.25, "zoneout": 0.2, "weight_dropout": 0.3},
}
T, B, D, N = 37, 3, 4, 5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=EXACT)


def kept(shape: tuple[int, ...], share: float) -> Tensor:
    """What is left of ones after dropout, scaled up."""
    return torch.empty(shape, dtype=EXACT).bernoulli_(1 - share) / (1 - share)


def loop(module: Any, x: Tensor, hx: Any = None, lengths: Tensor | None = None, resets: Tensor | None = None) -> Any:
    """Torch's cells one step after the other, with the masks that a call draws: weights of all layers, then layer by
    layer and direction by direction the states' and zoneout's.
    """
    training, lstm, directions = module.training, module.mode == "LSTM", 1 + module.bidirectional
    cells = []
    for layer in range(module.num_layers):
        for suffix in ("", "_reverse")[:directions]:
            names = [f"{name}_l{layer}{suffix}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            w_ih, w_hh, b_ih, b_hh = (getattr(module, name) for name in names)
            if training and module.weight_dropout:
                w_hh = w_hh * kept(tuple(w_hh.shape), module.weight_dropout)
            cells.append((w_ih, w_hh, b_ih, b_hh))
    zoneout = module.zoneout if isinstance(module.zoneout, tuple) else (module.zoneout,) * (2 if lstm else 1)
    (steps, batch), units = x.shape[:2], module.hidden_size
    finals, ends = [], torch.full((batch,), steps) if lengths is None else lengths
    for number, cell in enumerate(cells):
        if number % directions == 0:
            inputs, outputs = x, []
        shown = kept((batch, units), module.recurrent_dropout) if training and module.recurrent_dropout else 1.0
        held = []
        for share in zoneout if any(zoneout) else ():
            shares = torch.full((steps, batch, units), share, dtype=EXACT)
            held.append(ones_by_chance(shares, share) if training else shares)
        start = (
            [part[number] for part in hx] if hx is not None else [torch.zeros(batch, units, dtype=EXACT)] * (1 + lstm)
        )
        state, found = list(start), torch.zeros(steps, batch, units, dtype=EXACT)
        backwards = number % directions == 1
        for t in reversed(range(steps)) if backwards else range(steps):
            if resets is not None:
                cut = resets[t] if not backwards else resets[t + 1] if t + 1 < steps else torch.zeros_like(resets[0])
                state = [torch.where(cut[:, None], first, part) for first, part in zip(start, state, strict=True)]
            following = step(module.mode, cell, inputs[t], state, shown)
            for part, mask in enumerate(held):
                following[part] = mask[t] * state[part] + (1 - mask[t]) * following[part]
            alive = (t < ends)[:, None]
            state = [torch.where(alive, new, old) for new, old in zip(following, state, strict=True)]
            found = found.index_put((torch.tensor(t),), torch.where(alive, state[0], 0.0))
        outputs.append(found)
        finals.append(state)
        x = torch.cat(outputs, -1)
    final = tuple(torch.stack(part) for part in zip(*finals, strict=True))
    return x, final if lstm else final[0]


def step(mode: str, cell: tuple[Tensor, ...], x: Tensor, state: list[Tensor], shown: Any) -> list[Tensor]:
    w_ih, w_hh, b_ih, b_hh = cell
    by_x, by_h = F.linear(x, w_ih, b_ih), F.linear(state[0] * shown, w_hh, b_hh)
    if mode == "GRU":
        (x_r, x_z, x_n), (h_r, h_z, h_n) = by_x.chunk(3, -1), by_h.chunk(3, -1)
        z = torch.sigmoid(x_z + h_z)
        return [(1 - z) * torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n) + z * state[0]]
    if mode == "LSTM":
        i, f, g, o = (by_x + by_h).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return [torch.sigmoid(o) * torch.tanh(c), c]
    return [torch.tanh(by_x + by_h)]


def gradients(module: nn.Module, x: Tensor, call: Any) -> list[Tensor]:
    """Output, final state and the gradients of a loss of both by x and all parameters, after one seed."""
    torch.manual_seed(7)
    leaf = x.clone().requires_grad_()
    y, final = call(leaf)
    parts = final if isinstance(final, tuple) else (final,)
    loss = (y * draw(*y.shape, seed=9)).sum() + sum((part * draw(*part.shape, seed=8)).sum() for part in parts)
    module.zero_grad()
    loss.backward()
    return [y.detach(), *(part.detach() for part in parts), leaf.grad, *(p.grad for p in module.parameters())]


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-9) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("solver", ["auto", "sequential", Shooting(chunk=5, warmup=0)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_results_and_gradients_are_those_of_a_loop_with_the_same_masks(kind: str, options: str, solver: Any) -> None:
    torch.manual_seed(0)
    module = LAYERS[kind](D, N, num_layers=2, bidirectional=True, solver=solver, dtype=EXACT, **OPTIONS[options])
    x = draw(T, B, D)
    assert_same(gradients(module, x, module), gradients(module, x, lambda x: loop(module, x)))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_lengths_and_resets(kind: str, batch: int) -> None:
    torch.manual_seed(0)
    module = LAYERS[kind](D, N, bidirectional=True, dtype=EXACT, **OPTIONS["all"])
    x, lengths = draw(T, batch, D), torch.tensor([T, 20, 0][:batch])
    resets = torch.rand(T, batch, generator=torch.Generator().manual_seed(3)) < 0.1
    marks = {"lengths": lengths, "resets": resets}
    x = torch.where((torch.arange(T)[:, None] < lengths)[..., None], x, 0)
    found = gradients(module, x, lambda x: module(x, **marks))
    reset_both = reset_twice(resets, lengths)
    assert_same(found, gradients(module, x, lambda x: loop(module, x, None, lengths, reset_both)))


def reset_twice(resets: Tensor, lengths: Tensor) -> Tensor:
    """Resets without those behind a sequence's end, which a loop from the end would meet."""
    return resets & (torch.arange(len(resets))[:, None] < lengths)


@pytest.mark.parametrize("options", OPTIONS)
def test_batch_first_unbatched_and_packed(options: str) -> None:
    torch.manual_seed(0)
    module = tl.LSTM(D, N, batch_first=True, dtype=EXACT, **OPTIONS[options])
    x, lengths = draw(B, T, D), torch.tensor([T, 20, 7])
    torch.manual_seed(5)
    expected, final = loop(module, x.transpose(0, 1), None, lengths)
    torch.manual_seed(5)
    packed, last = module(pack_padded_sequence(x, lengths, batch_first=True))
    torch.testing.assert_close(pad_packed_sequence(packed)[0], expected)
    torch.testing.assert_close(last, final)
    torch.manual_seed(5)
    torch.testing.assert_close(module(x, lengths=lengths)[0], expected.transpose(0, 1))
    torch.manual_seed(5)
    expected = loop(module, x[:1].transpose(0, 1))[0][:, 0]
    torch.manual_seed(5)
    torch.testing.assert_close(module(x[0])[0], expected)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("options", ["variational", "zoneout", "all"])
def test_generated_kernels(kind: str, options: str) -> None:
    """So many steps that kernels are made, in float32 as well; many chunks and one."""
    torch.manual_seed(0)
    exact = LAYERS[kind](D, N, dtype=EXACT, **OPTIONS[options])
    x = draw(700, B, D)
    expected = gradients(exact, x, lambda x: loop(exact, x))
    for solver in (Shooting(chunk=50, warmup=20), "auto"):
        exact.solver = solver
        assert_same(gradients(exact, x, exact), expected, 1e-8)
        assert "fused" in exact.reports[0].reason
        assert "not fused" not in exact.reports[0].reason
    assert exact.reports[0].backward is not None
    single = LAYERS[kind](D, N, **OPTIONS[options])
    single.load_state_dict(exact.state_dict())
    torch.manual_seed(7)
    y = single(x.float())[0]
    torch.testing.assert_close(y.double(), expected[0], rtol=0, atol=2e-5)


def test_one_seed_one_result_and_another_seed_another() -> None:
    for options in OPTIONS.values():
        module = tl.GRU(D, N, dtype=EXACT, **options)
        x, found = draw(T, B, D), []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(module(x)[0])
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", LAYERS)
def test_evaluation_is_torch_s_layer_and_zoneout_s_expectation(kind: str) -> None:
    module, x = LAYERS[kind](D, N, dtype=EXACT, recurrent_dropout=0.5, weight_dropout=0.5).eval(), draw(T, B, D)
    torch_s = getattr(nn, kind)(D, N, dtype=EXACT)
    torch_s.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), torch_s(x))
    module.zoneout = 0.3
    torch.testing.assert_close(module(x), loop(module, x))
    assert torch.equal(module(x)[0], module(x)[0])


def test_zoneout_keeps_units_and_takes_a_pair() -> None:
    module = tl.LSTM(D, N, zoneout=(0.9, 0.0))

    def unchanged(part: Tensor) -> float:
        return float(torch.isclose(part[1:], part[:-1], rtol=1e-6, atol=1e-7).float().mean())

    assert 0.8 < unchanged(module(draw(T, B, D).float())[0]) < 0.97
    _, _, (h, c) = module(draw(T, B, D).float(), return_states=True)
    assert unchanged(c[0]) < 0.05
    assert 0.8 < unchanged(h[0]) < 0.97


def test_one_mask_a_sequence() -> None:
    """A unit whose recurrent weights are all that acts on the others: dropped once, dropped for all of time."""
    module = tl.RNN(1, 2, bias=False, recurrent_dropout=0.5, dtype=EXACT)
    with torch.no_grad():
        module.weight_ih_l0.copy_(torch.tensor([[1.0], [0.0]]))
        module.weight_hh_l0.copy_(torch.tensor([[0.0, 0.0], [0.3, 0.0]]))
    torch.manual_seed(0)
    second = module(torch.ones(50, 64, 1, dtype=EXACT))[0][1:, :, 1]
    assert torch.all(second == second[0])
    values = second[0].unique()
    assert len(values) == 2
    assert 0 in values


@pytest.mark.parametrize("options", OPTIONS)
def test_all_states(options: str) -> None:
    torch.manual_seed(0)
    module = tl.LSTM(D, N, num_layers=2, bidirectional=True, dtype=EXACT, **OPTIONS[options])
    x = draw(T, B, D)
    torch.manual_seed(1)
    y, (h_last, c_last), (h, c) = module(x, return_states=True)
    torch.testing.assert_close(torch.cat([h[2], h[3]], -1), y)
    torch.testing.assert_close(torch.stack([c[0, -1], c[1, 0], c[2, -1], c[3, 0]]), c_last)
    torch.testing.assert_close(torch.stack([h[0, -1], h[1, 0], h[2, -1], h[3, 0]]), h_last)


@pytest.mark.parametrize("options", OPTIONS)
def test_second_order_gradients(options: str) -> None:
    torch.manual_seed(0)
    module = tl.GRU(2, 3, dtype=EXACT, **OPTIONS[options])
    x = draw(6, 2, 2).requires_grad_()

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return module(x)[0]

    assert torch.autograd.gradgradcheck(run, (x,))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_projected_copied_pickled_and_shown(kind: str, options: str) -> None:
    more = {"proj_size": 3} if kind == "LSTM" else {}
    module = LAYERS[kind](D, N, **OPTIONS[options], **more)
    for name, value in OPTIONS[options].items():
        assert f"{name}={value}" in repr(module)
        assert getattr(pickle.loads(pickle.dumps(module)), name) == value
    assert module.state_dict().keys() == getattr(nn, kind)(D, N, **more).state_dict().keys()
    twin, x = copy.deepcopy(module), draw(T, B, D).float()
    torch.manual_seed(0)
    y = module(x)[0]
    torch.manual_seed(0)
    twin.solver = Shooting(chunk=10)
    torch.testing.assert_close(twin(x)[0], y, rtol=1e-4, atol=1e-5)


def test_parallelized_layers_take_the_options_and_names_in_use_are_refused() -> None:
    layer = tl.parallelize(nn.LSTM(D, N))
    layer.zoneout = (0.1, 0.2)
    layer.recurrent_dropout = 0.3
    assert repr(layer) == f"LSTM({D}, {N}, recurrent_dropout=0.3, zoneout=(0.1, 0.2))"
    tl.sequentialize(layer)  # torch has no such layer: it stays, one step after the other
    assert isinstance(layer, tl.LSTM)
    assert layer.solver == "sequential"

    class Mine(nn.LSTM):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.zoneout = 0.5

    with pytest.warns(UserWarning, match="zoneout is a name that timeloom's layer has, too"):
        assert not isinstance(tl.parallelize(Mine(D, N)), tl.LSTM)


@pytest.mark.parametrize("options", OPTIONS)
def test_other_devices_have_the_plain_loop(options: str) -> None:
    module = tl.LSTM(D, N, device="meta", **OPTIONS[options])
    y, _ = module(torch.empty(T, B, D, device="meta"))
    assert y.shape == (T, B, N)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.trace
def test_a_trace_would_keep_the_number_of_steps() -> None:
    module, x = tl.GRU(D, N, zoneout=0.1).eval(), torch.randn(T, B, D)
    with pytest.raises(NotImplementedError, match=r"no sweeps inside torch\.jit\.trace: set them to 0"):
        torch.jit.trace(module, x)
    with pytest.raises(NotImplementedError, match="no sweeps for a Like"):
        module(x.as_subclass(Like))


class Like(Tensor):
    """A tensor of a user's own kind."""


@pytest.mark.parametrize("kind", LAYERS)
def test_kernels_are_made_in_inference_mode_and_are_good_for_training(kind: str) -> None:
    module, x = LAYERS[kind](D, 6, zoneout=0.1).eval(), torch.randn(600, B, D)
    with torch.inference_mode():
        module(x)
    assert "not fused" not in module.reports[0].reason
    module.train()(x)[0].sum().backward()
    assert "not fused" not in module.reports[0].reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recurrent_dropout": 1.0}, r"recurrent_dropout must be a probability, 0 ≤ p < 1, got 1.0"),
        ({"zoneout": -0.1}, r"zoneout must be a probability, 0 ≤ p < 1, got -0.1"),
        ({"weight_dropout": "half"}, r"weight_dropout must be a probability, 0 ≤ p < 1, got str"),
        ({"zoneout": (0.1, 0.2)}, r"zoneout must be a number, got \(0.1, 0.2\)"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        tl.GRU(D, N, **options)
    with pytest.raises((ValueError, TypeError), match="zoneout must be a number, or a pair for h and c"):
        tl.LSTM(D, N, zoneout=(0.1, 0.1, 0.1))


@pytest.mark.parametrize("steps", [T, 600])
@pytest.mark.parametrize("kind", [tl.cells.MinimalGRU, tl.cells.SLSTM])
def test_zoneout_of_any_cell(kind: Any, steps: int) -> None:
    torch.manual_seed(0)
    layer = tl.Layer(kind(D, N), zoneout=0.3).double()
    x, cell = draw(steps, B, D), layer.cells[0]
    assert "zoneout=0.3" in repr(layer)

    def plainly(x: Tensor) -> tuple[Tensor, Any]:
        state = cell.initial(B)
        parts = state if isinstance(state, tuple) else (state,)
        kept = [torch.full((steps, *part.shape), 0.3, dtype=EXACT) for part in parts]
        kept = [ones_by_chance(share, 0.3) if layer.training else share for share in kept]
        found = []
        for t, row in enumerate(x.unbind(0)):
            after = cell(parts if isinstance(state, tuple) else parts[0], row)
            after = after if isinstance(after, tuple) else (after,)
            parts = tuple(k[t] * old + (1 - k[t]) * new for k, old, new in zip(kept, parts, after, strict=True))
            found.append(parts[0])
        final = tuple(part.unsqueeze(0) for part in parts)
        return torch.stack(found), final if isinstance(state, tuple) else final[0]

    assert_same(gradients(layer, x, layer), gradients(layer, x, plainly), 1e-8)
    assert ("not fused" in layer.reports[0].reason) == (steps < 512)
    layer.eval()
    torch.testing.assert_close(layer(x)[0], plainly(x)[0])
    with pytest.raises(ValueError, match="zoneout must be a probability"):
        tl.Layer(kind(D, N), zoneout=1.5)


def test_windows_refuse_masks_of_their_own() -> None:
    module, x = tl.GRU(D, N, zoneout=0.1), torch.randn(T, B, D)
    with pytest.raises(ValueError, match="would be drawn window by window"):
        tl.windowed(module, x, window=10)
    module.eval()
    torch.testing.assert_close(tl.windowed(module, x, window=10)[0], module(x)[0])


@pytest.mark.parametrize("options", OPTIONS)
def test_in_a_graph_of_torch_compile(options: str) -> None:
    config = pytest.importorskip("torch._dynamo").config
    if not hasattr(config, "allow_rnn"):
        pytest.skip("this torch has no allow_rnn")
    with config.patch(allow_rnn=True):
        torch.manual_seed(0)
        module = tl.LSTM(D, N, solver=Shooting(chunk=5), dtype=EXACT, **OPTIONS[options])
        x = draw(T, B, D)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_same(gradients(module, x, compiled), gradients(module, x, lambda x: loop(module, x)))
