"""Torch's recurrent layers and their timeloom twins: how to make a pair, run it, and compare what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import timeloom as tl
from timeloom.solvers import Shooting

T, B, D, H = 13, 3, 4, 5
"""Steps, batch, inputs, hidden units: small, all different, and 13 is prime, so that chunks are ragged."""

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gru": ("GRU", {}),
    "lstm": ("LSTM", {}),
    "lstm-projected": ("LSTM", {"proj_size": 3}),
    "rnn-tanh": ("RNN", {}),
    "rnn-relu": ("RNN", {"nonlinearity": "relu"}),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "batch-first": {"batch_first": True},
    "three-layers": {"num_layers": 3},
    "bidirectional": {"bidirectional": True},
    "all-at-once": {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
}

SHOOTING: dict[str, Shooting] = {
    "steps-newton": Shooting(chunk=1, correction="newton"),
    "threes-none": Shooting(chunk=3, correction="none", warmup=0),
    "fours-diag": Shooting(chunk=4, correction="diag", warmup=2),
    "tens-newton": Shooting(chunk=10, correction="newton", warmup=0),
    "whole": Shooting(chunk=T),
    "default": Shooting(),
}
"""Chunks of one step, ragged chunks, one chunk for all; several corrections; with and without warm-up."""

SOLVERS: dict[str, Any] = {"auto": "auto", "sequential": "sequential", **SHOOTING}

each_layer = pytest.mark.parametrize("name", LAYERS)
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
each_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
each_shooting = pytest.mark.parametrize("solver", SHOOTING.values(), ids=SHOOTING.keys())
each_way = pytest.mark.parametrize(
    "solver", ["auto", "sequential", Shooting(chunk=4)], ids=["auto", "sequential", "shooting"]
)
"""The three paths through a module: auto's choice, torch's own layer, our sweeps."""

Layer = nn.GRU | nn.LSTM | nn.RNN


def torch_layer(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Layer:
    """A layer of torch, initialised under the seed."""
    kind, own = LAYERS[name]
    torch.manual_seed(seed)
    layer: Layer = getattr(nn, kind)(D, H, **own, **options, dtype=dtype)
    return layer


def timeloom_layer(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """The same layer of timeloom."""
    kind, own = LAYERS[name]
    torch.manual_seed(seed)
    return getattr(tl, kind)(D, H, **own, **options, dtype=dtype)


def pair(name: str, solver: Any = "auto", dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Layer, Any]:
    """A torch layer and a timeloom layer with the same weights."""
    return torch_layer(name, dtype=dtype, **options), timeloom_layer(name, dtype=dtype, solver=solver, **options)


def inputs(layer: Layer, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random input; `(T, B, D)`, or `(B, T, D)` if the layer is batch-first, unless a shape is given."""
    shape = shape or ((B, T, D) if layer.batch_first else (T, B, D))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def hidden(layer: Layer, batch: int | None = B, seed: int = 2, dtype: torch.dtype = torch.float64) -> Any:
    """Random initial state as the layer takes it, without the batch dimension if `batch` is None."""
    stacked = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or layer.hidden_size] + [layer.hidden_size] * isinstance(layer, nn.LSTM)
    shapes = [(stacked, width) if batch is None else (stacked, batch, width) for width in widths]
    source = torch.Generator().manual_seed(seed)
    parts = tuple(torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes)
    return parts if isinstance(layer, nn.LSTM) else parts[0]


def parts_of(state: Any) -> tuple[Tensor, ...]:
    """A layer's state as a tuple: `(h,)`, or `(h, c)`."""
    return tuple(state) if isinstance(state, tuple | list) else (state,)


def as_double(state: Any) -> Any:
    """A state, or None, in float64."""
    if isinstance(state, tuple):
        return tuple(part.double() for part in state)
    return None if state is None else state.double()


def leaf(value: Any) -> Any:
    """A copy that collects gradients."""
    if isinstance(value, tuple):
        return tuple(leaf(part) for part in value)
    return value.detach().clone().requires_grad_()


def call(
    layer: Layer, x: Tensor, hx: Any = None, pack: Callable[[Tensor], PackedSequence] | None = None, **more: Any
) -> dict[str, Any]:
    """All results of a call by name, and the gradients of x, hx and every parameter for a loss on all results."""
    x, hx = leaf(x), (None if hx is None else leaf(hx))
    layer.zero_grad()
    output, final = layer(x if pack is None else pack(x), hx, **more)
    results = {"output": output if pack is None else output.data}
    results |= {f"final[{i}]": part for i, part in enumerate(parts_of(final))}
    loss_of(results.values()).backward()
    leaves = {**dict(layer.named_parameters()), "x": x}
    if hx is not None:
        leaves |= {f"hx[{i}]": part for i, part in enumerate(parts_of(hx))}
    grads = {f"grad {key}": value.grad for key, value in leaves.items()}
    return {key: None if value is None else value.detach().clone() for key, value in {**results, **grads}.items()}


def loss_of(tensors: Any) -> Tensor:
    """A smooth loss in which every entry has a different weight."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        weights = torch.linspace(-1, 1.5, tensor.numel(), dtype=torch.float64).sin().view(tensor.shape)
        total = total + (tensor.double() * weights).sum() + 0.5 * tensor.double().square().mean()
    return total


def assert_same(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-12) -> None:
    """Same names, shapes, dtypes and values, to a tolerance relative to each tensor's largest value."""
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert (actual[key] is None) == (value is None), f"{key}: {actual[key]} against {value}"
        if value is None:
            continue
        assert actual[key].shape == value.shape, f"{key}: {tuple(actual[key].shape)} against {tuple(value.shape)}"
        assert actual[key].dtype == value.dtype, f"{key}: {actual[key].dtype} against {value.dtype}"
        error = distance(actual[key], value)
        assert error <= tolerance, f"{key}: off by {error:.1e}"


def assert_as_good(actual: dict[str, Any], torchs: dict[str, Any], truth: dict[str, Any], floor: float = 2e-6) -> None:
    """No further from the float64 truth than twice torch's own distance, plus `floor`, twice the default tolerance."""
    assert actual.keys() == torchs.keys() == truth.keys()
    for key, value in truth.items():
        allowed = 2 * distance(torchs[key], value) + floor
        error = distance(actual[key], value)
        assert error <= allowed, f"{key}: off by {error:.1e}, allowed {allowed:.1e}"


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite if it is NaN."""
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=torch.inf))


def used_sweeps(layer: Any) -> bool:
    """Whether timeloom's own sweeps ran in the last call, and not torch's layer."""
    assert len(layer.reports) == layer.num_layers * (2 if layer.bidirectional else 1)
    return all("torch's own layer" not in report.reason for report in layer.reports)


def raised(action: Callable[[], Any]) -> Exception:
    """The error that an action ends with."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what the caller looks at
        action()
    return caught.value


def results(module: nn.Module, x: Tensor, **given: Any) -> list[Tensor]:
    """Outputs of a training step, and the gradients of x and of all weights."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y, _ = module(x, **given)
    y.sin().sum().backward()
    grads = [parameter.grad for parameter in module.parameters()]
    return [y.detach(), *(grad.clone() for grad in (x.grad, *grads) if grad is not None)]
