"""`return_states=True`: all states of all parts, against torch's cells one step after the other, with gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.nn import torch_layer
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")
T, B, D, H = 11, 3, 2, 4
LAYERS = {"gru": ("GRU", {}), "lstm": ("LSTM", {}), "rnn": ("RNN", {}), "projected": ("LSTM", {"proj_size": 3})}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers(name: str, solver: Any, **options: Any) -> tuple[nn.RNNBase, nn.RNNBase]:
    kind, more = LAYERS[name]
    torch.manual_seed(0)
    theirs = getattr(nn, kind)(D, H, dtype=torch.float64, **more, **options)
    ours = getattr(tl, kind)(D, H, dtype=torch.float64, solver=solver, **more, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def parts_of(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def step_by_step(layer: nn.RNNBase, x: Tensor, hx: Any, resets: Tensor | None = None) -> list[Tensor]:
    """States after every step, `(1, T, B, part)` for each part, of one layer of torch's in one direction."""
    state, found = hx, []
    for t in range(len(x)):
        if resets is not None:
            mark = resets[t].view(1, -1, 1)
            put_back = [torch.where(mark, o, s) for s, o in zip(parts_of(state), parts_of(hx), strict=True)]
            state = tuple(put_back) if isinstance(state, tuple) else put_back[0]
        _, state = layer(x[t : t + 1], state)
        found.append(parts_of(state))
    return [torch.stack(part, 1) for part in zip(*found, strict=True)]


def initial(layer: nn.RNNBase, stacked: int = 1) -> Any:
    if not isinstance(layer, nn.LSTM):
        return draw(stacked, B, H, seed=4)
    return draw(stacked, B, layer.proj_size or H, seed=4), draw(stacked, B, H, seed=5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("solver", ["auto", "sequential", Shooting(chunk=4)])
@pytest.mark.parametrize("marked", [False, True])
def test_states_and_gradients(name: str, solver: Any, marked: bool) -> None:
    ours, theirs = layers(name, solver)
    resets = (draw(T, B, seed=6) > 1) if marked else None
    found = []
    for layer in (ours, theirs):
        x = draw(T, B, D, seed=1).requires_grad_()
        hx = initial(layer)
        for part in parts_of(hx):
            part.requires_grad_()
        if layer is ours:
            y, last, states = layer(x, hx, resets=resets, return_states=True)
            assert torch.equal(parts_of(states)[0][0], y)
            for part, final in zip(parts_of(states), parts_of(last), strict=True):
                torch.testing.assert_close(part[:, -1], final)
            states = list(parts_of(states))
        else:
            states = step_by_step(layer, x, hx, resets)
        sum((part * draw(*part.shape, seed=7)).sum() for part in states).backward()
        grads = [x.grad, *(part.grad for part in parts_of(hx)), *(p.grad for p in layer.parameters())]
        found.append([*(part.detach() for part in states), *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_layers_directions_and_lengths(name: str) -> None:
    ours, theirs = layers(name, Shooting(chunk=4), num_layers=2, bidirectional=True, batch_first=True)
    x, lengths = draw(B, T, D, seed=1), torch.tensor([T, 5, 1])
    y, last, states = ours(x, lengths=lengths, return_states=True)
    for part, final in zip(parts_of(states), parts_of(last), strict=True):
        assert part.shape == (4, B, T, H)
        for row, length in enumerate(lengths.tolist()):
            assert not part[:, row, length:].any()
            ends = torch.stack([part[i, row, length - 1 if i % 2 == 0 else 0] for i in range(4)])
            torch.testing.assert_close(ends, final[:, row])
    torch.testing.assert_close(torch.cat([*parts_of(states)[0][2:]], -1), y)
    one, _, alone = ours(x[0], return_states=True)
    assert parts_of(alone)[0].shape == (4, T, H)
    torch.testing.assert_close(parts_of(alone)[-1], parts_of(states)[-1][:, 0])
    torch.testing.assert_close(one, theirs(x[0])[0])


def test_where_there_are_none() -> None:
    layer = tl.GRU(D, H)
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, D)])
    with pytest.raises(NotImplementedError, match="no return_states= for a PackedSequence: give a padded tensor"):
        layer(packed, return_states=True)
    with pytest.raises(
        NotImplementedError, match="return_states= is for timeloom's own sweeps, and there are no sweeps"
    ):
        layer(torch.randn(3, 1, D).as_subclass(Counting), return_states=True)


def test_inside_a_transform() -> None:
    layer, x = tl.LSTM(D, H).double(), torch.randn(2, 30, 1, D, dtype=torch.float64)
    _, _, (h, c) = torch.func.vmap(lambda x: layer(x, return_states=True))(x)
    _, _, expected = layer(x[1], return_states=True)
    torch.testing.assert_close((h[1], c[1]), expected)


class Counting(Tensor):
    """A tensor that counts what is done with it."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Like:
    """No tensor at all, but torch's functions take it."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["data"], name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.data if isinstance(arg, Like) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
@pytest.mark.parametrize("wrap", [lambda x: x.as_subclass(Counting), Like], ids=["subclass", "like"])
def test_tensor_likes_as_torch_takes_them(kind: str, wrap: Any) -> None:
    ours, theirs = getattr(tl, kind)(D, H), getattr(nn, kind)(D, H)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(300, B, D)
    y, expected = ours(wrap(x))[0], theirs(wrap(x))[0]
    assert type(y) is type(expected)
    torch.testing.assert_close(torch.Tensor(y.detach()), torch.Tensor(expected.detach()))
    assert "torch's own layer" in ours.reports[0].reason


def test_an_initial_state_that_is_a_tensor_like() -> None:
    ours = tl.GRU(D, H, solver="shooting")
    y, _ = ours(torch.randn(40, B, D), torch.zeros(1, B, H).as_subclass(Counting))
    assert type(y) is Counting


def test_other_devices_run_torchs_layer_and_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_layer, "SWEPT", ("cuda",))
    torch_layer._tell_once.cache_clear()
    layer, x = tl.LSTM(D, H), torch.randn(300, B, D)
    with pytest.warns(UserWarning, match="timeloom has no sweeps on cpu: torch's own layers run there"):
        layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, _ = layer(x)
        tl.GRU(D, H)(x)
    torch.testing.assert_close(y, nn.LSTM.forward(layer, x)[0])
    assert layer.reports[0].reason.startswith("no sweeps on cpu")
    torch_layer._tell_once.cache_clear()


def test_a_meta_device_is_silent() -> None:
    layer = tl.GRU(D, H, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layer(torch.empty(5, B, D, device="meta"))[0].shape == (5, B, H)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_states_are_of_the_final_states_dtype(name: str, dtype: torch.dtype, autocast: bool) -> None:
    kind, more = LAYERS[name]
    layer = getattr(tl, kind)(D, H, solver=Shooting(chunk=4), **more).to(torch.float32 if autocast else dtype)
    x = draw(T, B, D).to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        y, final, states = layer(x, return_states=True)
    found = [(every.dtype, last.dtype) for every, last in zip(parts_of(states), parts_of(final), strict=True)]
    assert all(every == last for every, last in found), found
    assert parts_of(states)[0][0].equal(y)
