"""GRU, LSTM and RNN with dropout inside the recurrence: torch's steps, over inputs that carry masks.

A row is what the input contributes to a step, `u`, and behind it, where there are such:

    m            `(n,)`         what the state is multiplied by before the recurrent product (variational dropout)
    d_h, d_c     a part each    the share of every unit that a step keeps as it was (zoneout)

Zoneout's unit is `s⁺ + d (s − s⁺)`: of d = 0 or 1 one of the two, up to rounding; of its expectation, a mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from timeloom.cells.base import Cell
from timeloom.cells.gru import GRUCell
from timeloom.cells.lstm import LSTMCell
from timeloom.cells.rnn import RNNCell

Step = Callable[..., Any]


def gru_step(w_hh: Tensor, b_hn: Tensor, dropped: bool, zoned: bool, h: Tensor, row: Tensor) -> Tensor:
    """Torch's GRU; the state passes the update gate by undropped."""
    (n,) = h.shape[1:]
    u, shown, kept = _taken_apart(row, 3 * n, (h,), dropped, zoned)
    u_r, u_z, u_n = u.chunk(3, -1)
    g_r, g_z, g_n = F.linear(shown, w_hh).chunk(3, -1)
    reset, update = torch.sigmoid(u_r + g_r), torch.sigmoid(u_z + g_z)
    return _zoned(torch.lerp(torch.tanh(u_n + reset * (g_n + b_hn)), h, update), h, kept, 0)


def lstm_step(
    w_hh: Tensor, w_hr: Tensor | None, dropped: bool, zoned: bool, state: tuple[Tensor, Tensor], row: Tensor
) -> tuple[Tensor, Tensor]:
    """Torch's LSTM, projected where w_hr is given. What c would be is what h is made of, whether or not c keeps it."""
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
    """u, the state as the recurrent product sees it, and what is kept of each part."""
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
"""Of each of torch's cells, its step over rows that carry masks."""
