"""The cells of `timeloom.cells` written independently from their papers' equations, as a reference for the tests.

Each function takes the cell's parameters by name, the parts of the state and x, and returns the next parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Parameters = dict[str, Tensor]
Parts = tuple[Tensor, ...]


def σ(a: Tensor) -> Tensor:
    return 1 / (1 + (-a).exp())


def norm(p: Parameters, name: str, a: Tensor) -> Tensor:
    apart = a - a.mean(-1, keepdim=True)
    scaled = apart / (apart.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def gate(matrix: Tensor, value: Tensor, number: int, n: int) -> Tensor:
    return value @ matrix[number * n : (number + 1) * n].t()


def blocks(weight: Tensor, h: Tensor) -> Tensor:
    width = weight.shape[1]
    pieces = [h[:, b * width : (b + 1) * width] @ weight[b] for b in range(len(weight))]
    return torch.cat(pieces, -1)


def layer_norm_gru(p: Parameters, s: Parts, x: Tensor) -> Parts:
    (h,), n = s, s[0].shape[1]
    a, b = norm(p, "input_norm", x @ p["input.weight"].t()), norm(p, "recurrent_norm", h @ p["recurrent.weight"].t())
    r, z = σ(a[:, :n] + b[:, :n]), σ(a[:, n : 2 * n] + b[:, n : 2 * n])
    return ((1 - z) * torch.tanh(a[:, 2 * n :] + r * b[:, 2 * n :]) + z * h,)


def layer_norm_lstm(p: Parameters, s: Parts, x: Tensor) -> Parts:
    (h, c), n = s, s[0].shape[1]
    a = norm(p, "input_norm", x @ p["input.weight"].t()) + norm(p, "recurrent_norm", h @ p["recurrent.weight"].t())
    i, f, g, o = (a[:, k * n : (k + 1) * n] for k in range(4))
    c = σ(f) * c + σ(i) * torch.tanh(g)
    return σ(o) * torch.tanh(norm(p, "cell_norm", c)), c


def slstm(p: Parameters, s: Parts, x: Tensor) -> Parts:
    (h, c, n, m), width = s, s[0].shape[1]
    z, i, f, o = (
        gate(p["input.weight"], x, k, width)
        + p["input.bias"][k * width : (k + 1) * width]
        + blocks(p["recurrent"][k], h)
        for k in range(4)
    )
    following = torch.maximum(σ(f).log() + m, i)
    i, f = (i - following).exp(), (σ(f).log() + m - following).exp()
    c, n = f * c + i * torch.tanh(z), f * n + i
    return σ(o) * (c / n), c, n, following


def block_gru(p: Parameters, s: Parts, x: Tensor) -> Parts:
    (h,), n = s, s[0].shape[1]
    y = x @ p["input.weight"].t() + torch.cat([blocks(weight, h) for weight in p["recurrent"]], -1)
    y = norm(p, "norm", y)
    z = σ(y[:, 2 * n :] - 1)
    return (z * torch.tanh(σ(y[:, :n]) * y[:, n : 2 * n]) + (1 - z) * h,)


def li_gru(p: Parameters, s: Parts, x: Tensor) -> Parts:
    (h,), n = s, s[0].shape[1]
    a = norm(p, "norm", x @ p["input.weight"].t())
    z = σ(a[:, :n] + gate(p["recurrent.weight"], h, 0, n))
    c = (a[:, n:] + gate(p["recurrent.weight"], h, 1, n)).clamp(min=0)
    return (z * h + (1 - z) * c,)


def peephole_lstm(p: Parameters, s: Parts, x: Tensor) -> Parts:
    (h, c), n = s, s[0].shape[1]
    i, f, g, o = (
        gate(p["input.weight"], x, k, n) + p["input.bias"][k * n : (k + 1) * n] + gate(p["recurrent.weight"], h, k, n)
        for k in range(4)
    )
    by_i, by_f, by_o = p["peepholes"]
    c = σ(f + by_f * c) * c + σ(i + by_i * c) * torch.tanh(g)
    return σ(o + by_o * c) * torch.tanh(c), c


def ctrnn(p: Parameters, s: Parts, x: Tensor) -> Parts:
    (h,) = s
    a = σ(p["rate"])
    drive = torch.tanh(h) @ p["recurrent.weight"].t() + x @ p["input.weight"].t() + p["input.bias"]
    return ((1 - a) * h + a * drive,)


def cfc(p: Parameters, s: Parts, x: Tensor) -> Parts:
    (h,), d = s, x.shape[1]
    n, weight = h.shape[1], p["backbone.weight"]
    y = 1.7159 * torch.tanh((x @ weight[:, :d].t() + h @ weight[:, d:].t() + p["backbone.bias"]) * 2 / 3)
    s_, f, g = (gate(p["heads.weight"], y, k, n) + p["heads.bias"][k * n : (k + 1) * n] for k in range(3))
    return ((1 - σ(s_)) * torch.tanh(f) + σ(s_) * torch.tanh(g),)


def minimal_gru(p: Parameters, s: Parts, x: Tensor) -> Parts:
    (h,), n = s, s[0].shape[1]
    f = σ(gate(p["input.weight"], x, 0, n) + p["input.bias"][:n] + h @ p["gate.weight"].t())
    c = torch.tanh(gate(p["input.weight"], x, 1, n) + p["input.bias"][n:] + (f * h) @ p["candidate.weight"].t())
    return ((1 - f) * h + f * c,)


OPTIONS: dict[str, dict[str, int]] = {
    "LayerNormGRU": {}, "LayerNormLSTM": {}, "SLSTM": {"heads": 3}, "BlockGRU": {"blocks": 3}, "LiGRU": {},
    "PeepholeLSTM": {}, "CTRNN": {}, "CfC": {"backbone": 11}, "MinimalGRU": {},
}  # fmt: skip
"""Options of each cell, beside its sizes; three divides its units."""
EQUATIONS: dict[str, Callable[[Parameters, Parts, Tensor], Parts]] = {
    "LayerNormGRU": layer_norm_gru,
    "LayerNormLSTM": layer_norm_lstm,
    "SLSTM": slstm,
    "BlockGRU": block_gru,
    "LiGRU": li_gru,
    "PeepholeLSTM": peephole_lstm,
    "CTRNN": ctrnn,
    "CfC": cfc,
    "MinimalGRU": minimal_gru,
}


def loop(
    name: str, p: Parameters, start: Parts, xs: Tensor, lengths: Tensor | None = None, resets: Tensor | None = None
) -> tuple[list[Tensor], Parts]:
    """States after every step, `(T, B, ·)` for each part, zero past a sequence's end; and the final ones."""
    state, history = start, []
    for t, x in enumerate(xs):
        alive = torch.ones(len(x), 1, dtype=torch.bool) if lengths is None else (t < lengths).unsqueeze(-1)
        if resets is not None:
            back = resets[t, :, None] & alive
            state = tuple(torch.where(back, first, part) for first, part in zip(start, state, strict=True))
        following = EQUATIONS[name](p, state, torch.where(alive, x, torch.zeros_like(x)))
        state = tuple(torch.where(alive, new, old) for new, old in zip(following, state, strict=True))
        history.append([torch.where(alive, part, torch.zeros_like(part)) for part in state])
    return [torch.stack(part) for part in zip(*history, strict=True)], state
