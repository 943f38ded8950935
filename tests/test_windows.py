"""Windows with a carried state against one call in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl

KINDS = [tl.GRU, tl.LSTM, tl.RNN, tl.ImplicitGRU, nn.GRU, nn.LSTM]


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [part for item in value for part in flat(item)]


def gradients(run: Any, layer: nn.Module, leaves: list[Tensor]) -> list[Tensor]:
    results = flat(run())
    torch.manual_seed(3)
    loss = sum((result * torch.randn(result.shape, dtype=result.dtype)).sum() for result in results)
    assert isinstance(loss, Tensor)
    return [result.detach() for result in results] + list(torch.autograd.grad(loss, [*leaves, *layer.parameters()]))


@pytest.mark.parametrize("window", [1, 7, 40, 41, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_one_call(kind: type[nn.RNNBase], window: int) -> None:
    torch.manual_seed(0)
    layer = kind(3, 5, num_layers=2, batch_first=True).double()
    x = torch.randn(2, 41, 3, dtype=torch.float64, requires_grad=True)
    hidden = [
        torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(1 + ("LSTM" in kind.__name__))
    ]
    hx = tuple(hidden) if len(hidden) == 2 else hidden[0]
    whole = gradients(lambda: layer(x, hx), layer, [x, *hidden])
    pieces = gradients(lambda: tl.windowed(layer, x, hx, window=window), layer, [x, *hidden])
    for ours, truth in zip(pieces, whole, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-11)


def test_unbatched_and_without_an_initial_state() -> None:
    layer = tl.GRU(3, 5).double()
    x = torch.randn(30, 3, dtype=torch.float64)
    for ours, truth in zip(flat(tl.windowed(layer, x, window=8)), flat(layer(x)), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


def test_one_window_is_in_memory_at_a_time() -> None:
    """Of all values that autograd keeps for one call, windows keep the inputs alone."""
    layer, x = tl.GRU(4, 32), torch.randn(4096, 1, 4)

    def kept(run: Any) -> int:
        sizes: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t)
        with hooks:
            run()
        return sum(sizes)

    assert kept(lambda: tl.windowed(layer, x, window=256)) < kept(lambda: layer(x)) / 10


def test_bad_input_is_named() -> None:
    gru, x = tl.GRU(3, 5), torch.randn(10, 2, 3)
    with pytest.raises(TypeError, match=r"recurrent layer of timeloom or .*, got Linear"):
        tl.windowed(nn.Linear(3, 5), x, window=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bidirectional"):
        tl.windowed(tl.GRU(3, 5, bidirectional=True), x, window=5)
    with pytest.raises(ValueError, match=r"dropout=0\.5"):
        tl.windowed(tl.GRU(3, 5, num_layers=2, dropout=0.5), x, window=5)
    with pytest.raises(ValueError, match="window must be a whole number"):
        tl.windowed(gru, x, window=0)
    with pytest.raises(ValueError, match="at least one step"):
        tl.windowed(gru, x[:0], window=5)
    with pytest.raises(ValueError, match="2 or 3 dimensions"):
        tl.windowed(gru, x[0, 0], window=5)
