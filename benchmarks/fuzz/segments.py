"""Ragged sequences and resets in torch's own layers: each stretch between resets is run as a separate sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from benchmarks.fuzz.case import TWINS, Case

Stretch = tuple[int, int, int]
"""A sequence's number, its first step, and one past its last."""


def stretches(steps: int, batch: int, ragged: dict[str, Tensor]) -> list[Stretch]:
    """All stretches between resets, in the order of sequences and of time."""
    lengths = ragged["lengths"].tolist() if "lengths" in ragged else [steps] * batch
    resets = ragged["resets"].T.tolist() if "resets" in ragged else [[False] * steps] * batch
    found = []
    for row, length in enumerate(lengths):
        marks = [0, *(step for step in range(1, length) if resets[row][step]), length]
        found += [(row, begin, end) for begin, end in pairwise(marks)]
    return found


def run_segments(
    case: Case, layer: nn.RNNBase, run_loop: Callable[..., Any], x: Tensor, h0: tuple[Tensor, ...],
    ragged: dict[str, Tensor],
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Outputs `(T, B, ·)`, zero in the padding, and the final states, from all stretches side by side."""
    steps, batch = x.shape[:2]
    cut = stretches(steps, batch, ragged)
    rows = torch.tensor([row for row, _, _ in cut], device=x.device)
    pieces = [x[begin:end, row] for row, begin, end in cut]
    hx = tuple(part[:, rows] for part in h0)
    if case.cell in TWINS:
        given = pad_sequence(pieces, batch_first=case.batch_first)
        lengths = torch.tensor([len(piece) for piece in pieces])
        packed = pack_padded_sequence(given, lengths, case.batch_first, enforce_sorted=False)
        out, final = layer(packed, hx if case.cell == "LSTM" else hx[0])
        y, _ = pad_packed_sequence(out, batch_first=False)
        results = [y[: len(piece), index] for index, piece in enumerate(pieces)]
        finals = final if isinstance(final, tuple) else (final,)
    else:  # a loop has no padding: one stretch after the other
        runs = [
            run_loop(case, layer, piece.unsqueeze(1), tuple(part[:, index : index + 1] for part in hx))
            for index, piece in enumerate(pieces)
        ]
        results = [y.squeeze(1) for y, _ in runs]
        finals = tuple(torch.cat(parts, 1) for parts in zip(*(final for _, final in runs), strict=True))
    return _joined(results, cut, steps, batch), tuple(_last(part, cut, batch, case.directions) for part in finals)


def _joined(results: list[Tensor], cut: list[Stretch], steps: int, batch: int) -> Tensor:
    columns = []
    for wanted in range(batch):
        column = torch.cat([result for result, (row, _, _) in zip(results, cut, strict=True) if row == wanted])
        columns.append(torch.nn.functional.pad(column, (0, 0, 0, steps - len(column))))
    return torch.stack(columns, 1)


def _last(part: Tensor, cut: list[Stretch], batch: int, directions: int) -> Tensor:
    """The final state of each sequence: that of its last stretch, or of its first one in the reverse direction."""
    rows = [row for row, _, _ in cut]
    first = [rows.index(row) for row in range(batch)]
    last = [len(rows) - 1 - rows[::-1].index(row) for row in range(batch)]
    return torch.stack([layer[first if directions == 2 and index % 2 else last] for index, layer in enumerate(part)])
