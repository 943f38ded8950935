"""Dropout inside the recurrence in torch operations, with the masks that a timeloom call draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _VF, Tensor
from torch.nn import functional as F

from benchmarks.fuzz.case import DTYPES, Case
from timeloom.nn.draws import ones_by_chance

OPTIONS: tuple[dict[str, float], ...] = (
    {"recurrent_dropout": 0.4},
    {"zoneout": 0.3},
    {"weight_dropout": 0.5},
    {"recurrent_dropout": 0.25, "zoneout": 0.2, "weight_dropout": 0.3},
)


def options_of(case: Case) -> dict[str, float]:
    """The dropout options of a case."""
    return OPTIONS[case.seed % len(OPTIONS)]


@contextmanager
def same_masks(case: Case) -> Iterator[None]:
    """Context in which all runs of a case draw the same masks; the random state is restored behind it."""
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        yield


def run_dropping(case: Case, layer: Any, x: Tensor, h0: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer of torch's, step by step; in one call if weights alone are dropped.

    Masks are drawn in the case's dtype, whatever x's: first those of the weights, then the state's, one for each
    sequence, then zoneout's for h and for c.
    """
    dropped, drawn = options_of(case), x.new_empty(0, dtype=DTYPES[case.dtype])
    steps, batch = x.shape[:2]
    weight_hh, shown, held = layer.weight_hh_l0, None, []
    with same_masks(case):
        if "weight_dropout" in dropped:
            weight_hh = weight_hh * _kept(weight_hh.shape, dropped["weight_dropout"], drawn).to(x.dtype)
        if "recurrent_dropout" in dropped:
            shown = _kept((batch, case.n), dropped["recurrent_dropout"], drawn).to(x.dtype)
        for _ in h0 if "zoneout" in dropped else ():
            held.append(ones_by_chance(drawn.new_empty(steps, batch, case.n), dropped["zoneout"]).to(x.dtype))
    biases = (layer.bias_ih_l0, layer.bias_hh_l0) if case.bias else (None, None)
    if dropped.keys() == {"weight_dropout"}:
        weights = [layer.weight_ih_l0, weight_hh, *(bias for bias in biases if bias is not None)]
        return _whole(case.cell, x, h0, weights, case.bias)
    by_x = F.linear(x, layer.weight_ih_l0, biases[0])
    state, outputs = [part[0] for part in h0], []
    for t in range(steps):
        seen = state[0] if shown is None else state[0] * shown
        following = _step(case.cell, by_x[t], F.linear(seen, weight_hh, biases[1]), state)
        for part, keeps in enumerate(held):
            following[part] = keeps[t] * state[part] + (1 - keeps[t]) * following[part]
        state = following
        outputs.append(state[0])
    return torch.stack(outputs), tuple(part.unsqueeze(0) for part in state)


def _whole(
    cell: str, x: Tensor, h0: tuple[Tensor, ...], weights: list[Tensor], bias: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Torch's layer with these weights: cuDNN on a GPU, whose errors are larger than those of a loop."""
    run: Any = {"GRU": _VF.gru, "LSTM": _VF.lstm, "RNN": _VF.rnn_tanh, "RNN_RELU": _VF.rnn_relu}[cell]
    taped = torch.is_grad_enabled()
    y, *final = run(x, h0 if cell == "LSTM" else h0[0], weights, bias, 1, 0.0, taped, False, False)
    return y, tuple(final)


def _step(cell: str, by_x: Tensor, by_h: Tensor, state: list[Tensor]) -> list[Tensor]:
    if cell == "GRU":
        (x_r, x_z, x_n), (h_r, h_z, h_n) = by_x.chunk(3, -1), by_h.chunk(3, -1)
        z = torch.sigmoid(x_z + h_z)
        return [z * state[0] + (1 - z) * torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)]
    if cell == "LSTM":
        i, f, g, o = (by_x + by_h).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return [torch.sigmoid(o) * torch.tanh(c), c]
    return [torch.relu(by_x + by_h) if cell == "RNN_RELU" else torch.tanh(by_x + by_h)]


def _kept(shape: tuple[int, ...], share: float, drawn: Tensor) -> Tensor:
    """A dropout mask, of the kind of `drawn`: ones with probability 1 − share, scaled up."""
    return drawn.new_empty(shape).bernoulli_(1 - share) / (1 - share)
