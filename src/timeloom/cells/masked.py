"""GRU, LSTM and RNN with dropout inside the recurrence: torch's steps, over inputs that carry masks.

A row is the input's contribution to a step, `u`, and behind it the masks, if there are any:

    m            `(n,)`         a factor of h in the recurrent product (variational dropout)
    d_h, d_c     a part each    the share of every unit that a step keeps unchanged (zoneout)

Zoneout computes `s⁺ + d (s − s⁺)`: one of the two for d = 0 or 1, up to rounding; a mixture for d's expectation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from timeloom.cells.base import Cell, Masks, jacobian_by_vjp
from timeloom.cells.gru import GRUCell
from timeloom.cells.lstm import LSTMCell
from timeloom.cells.rnn import RNNCell

Step = Callable[..., Any]


def gru_step(w_hh: Tensor, b_hn: Tensor, dropped: bool, zoned: bool, h: Tensor, row: Tensor) -> Tensor:
    """Torch's GRU; the state that the update gate keeps is not dropped."""
    (n,) = h.shape[1:]
    u, shown, kept = _taken_apart(row, 3 * n, (h,), dropped, zoned)
    u_r, u_z, u_n = u.chunk(3, -1)
    g_r, g_z, g_n = F.linear(shown, w_hh).chunk(3, -1)
    reset, update = torch.sigmoid(u_r + g_r), torch.sigmoid(u_z + g_z)
    return _zoned(torch.lerp(torch.tanh(u_n + reset * (g_n + b_hn)), h, update), h, kept, 0)


def lstm_step(
    w_hh: Tensor, w_hr: Tensor | None, dropped: bool, zoned: bool, state: tuple[Tensor, Tensor], row: Tensor
) -> tuple[Tensor, Tensor]:
    """Torch's LSTM, projected if w_hr is given; h is computed from c before zoneout."""
    h, c = state
    u, shown, kept = _taken_apart(row, len(w_hh), state, dropped, zoned)
    i, f, g, o = (u + F.linear(shown, w_hh)).chunk(4, -1)
    following = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    out = torch.sigmoid(o) * torch.tanh(following)
    out = out if w_hr is None else F.linear(out, w_hr)
    return _zoned(out, h, kept, 0), _zoned(following, c, kept, 1)


def rnn_step(w_hh: Tensor, nonlinearity: str, dropped: bool, zoned: bool, h: Tensor, row: Tensor) -> Tensor:
    """Torch's RNN."""
    u, shown, kept = _taken_apart(row, len(w_hh), (h,), dropped, zoned)
    before = u + F.linear(shown, w_hh)
    return _zoned(torch.tanh(before) if nonlinearity == "tanh" else torch.relu(before), h, kept, 0)


def _taken_apart(
    row: Tensor, gates: int, parts: tuple[Tensor, ...], dropped: bool, zoned: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """u, h as the recurrent product sees it, and the kept share of each part."""
    widths = [part.shape[-1] for part in parts]
    u, *masks = row.split([gates, *widths[: int(dropped)], *(widths if zoned else ())], -1)
    return u, parts[0] * masks[0] if dropped else parts[0], masks[int(dropped) :]


def _zoned(following: Tensor, before: Tensor, kept: list[Tensor], part: int) -> Tensor:
    return following + kept[part] * (before - following) if kept else following


def _of_lstm(cell: Any) -> Step:
    w_hh, *w_hr = cell.weights
    return partial(lstm_step, w_hh, w_hr[0] if w_hr else None)


STEPS: dict[type[Cell], Callable[[Any], Step]] = {
    GRUCell: lambda cell: partial(gru_step, *cell.weights),
    LSTMCell: _of_lstm,
    RNNCell: lambda cell: partial(rnn_step, cell.weights[0], cell.nonlinearity),
}
"""The step of each of torch's cells over rows that carry masks."""


Pulled = tuple[Tensor, Tensor, Tensor]
"""Gradients `(N, ·)` of the recurrent product's operand, of the state that bypasses it, and of the gates."""


def _gru_pull(cell: Any, shown: Tensor, state: Tensor, u: Tensor, grad: Tensor) -> Pulled:
    gates = cell._gates(shown, u)
    update = gates[1]
    keep, *slopes = cell._slopes_of(state, gates, update, 1 - update, update * (1 - update))
    d_reset, d_update, d_candidate, d_inner = (grad * slope for slope in slopes)
    through = torch.cat([d_reset, d_update, d_inner], -1)
    return through @ cell.weights[0], grad * keep, torch.cat([d_reset, d_update, d_candidate, d_inner], -1)


def _other_pull(cell: Cell, shown: Tensor, state: Tensor, u: Tensor, grad: Tensor) -> Pulled:
    """The vjp of cells in which h only enters the product."""
    n = cell.parts[0]
    back, gates = cell.vjp(torch.cat([shown, state[..., n:]], -1), u, grad)
    return back[..., :n], F.pad(back[..., n:], (n, 0)), gates


class MaskedCell(Cell):
    """One of torch's cells over rows that carry masks; kernels and gate gradients are those of the plain cell."""

    whole_state_out = True

    def __init__(self, plain: Cell, masks: Masks) -> None:
        self.plain, self.masks, self.weights = plain, masks, plain.weights
        self.parts, self.gate_width, self.gated = plain.parts, plain.gate_width, plain.gated
        self.kernel = plain.kernel
        self.behind = masks.dropped * plain.parts[0] + masks.zoned * plain.size
        self.told = "fused"

    def with_weights(self, weights: tuple[Tensor, ...]) -> Cell:
        return MaskedCell(self.plain.with_weights(weights), self.masks)

    def step(self, state: Tensor, u: Tensor) -> Tensor:
        parts = state.split(self.parts, -1)
        after = STEPS[type(self.plain)](self.plain)(*self.masks, parts if len(parts) > 1 else parts[0], u)
        return torch.cat(after, -1) if isinstance(after, tuple) else after

    def vjp(self, state: Tensor, u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        gates, masks = self._apart(u)
        h = state[..., : self.parts[0]]
        mask = masks[..., : self.parts[0]] if self.masks.dropped else torch.ones_like(h)
        kept = masks[..., -self.size :] if self.masks.zoned else torch.zeros_like(state)
        pull = _gru_pull if isinstance(self.plain, GRUCell) else _other_pull
        by_shown, passing, gate_grads = pull(self.plain, h * mask, state, gates, grad - kept * grad)
        through = F.pad(by_shown * mask, (0, self.size - self.parts[0]))
        return through + passing + kept * grad, gate_grads

    def decay(self, state: Tensor, u: Tensor) -> Tensor:
        gates, masks = self._apart(u)
        (shown,), last = self.multiplied((state[..., : self.parts[0]],), u), self.parts[-1]
        keep = self.plain.decay(torch.cat([shown, state[..., self.parts[0] :]], -1), gates)
        if not self.masks.zoned:
            return keep
        kept = F.pad(masks[..., -last:], (self.size - last, 0))  # an LSTM's h counts as not kept
        return keep + kept * (1 - keep)

    def jacobian(self, state: Tensor, u: Tensor) -> Tensor:
        return jacobian_by_vjp(self, state, u)

    def input_grads(self, gate_grads: Tensor) -> Tensor:
        return F.pad(self.plain.input_grads(gate_grads), (0, self.behind))

    def multiplied(self, previous: Sequence[Tensor], u: Tensor) -> Sequence[Tensor]:
        if not self.masks.dropped:
            return previous
        masks = self._apart(u)[1]
        return previous[0] * masks[..., : self.parts[0]], *previous[1:]

    def weight_grads(self, previous: Sequence[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
        return self.plain.weight_grads(previous, gate_grads)

    def bound(self, initial: Tensor) -> Tensor | None:
        return self.plain.bound(initial)

    def _gates(self, h: Tensor, u: Tensor) -> list[Tensor]:
        """What CUDA kernels save of a step: the plain cell's gates, or an RNN's new state, and the kept shares."""
        gates, masks = self._apart(u)
        (shown,) = self.multiplied((h,), u)
        plain: Any = self.plain
        values = (plain.step(shown, gates),) if isinstance(plain, RNNCell) else plain._gates(shown, gates)
        return [*values, *([masks[..., -self.size :]] if self.masks.zoned else [])]

    def _apart(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """u, and the masks behind it."""
        gates, masks = u.split((u.shape[-1] - self.behind, self.behind), -1)
        return gates, masks
