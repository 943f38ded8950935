"""Dropout inside the recurrence, as options of modules: checked, and drawn for every call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from timeloom.cells.base import Cell, Masks
from timeloom.cells.fused import FusedCell
from timeloom.cells.generic import GenericCell
from timeloom.cells.masked import STEPS, MaskedCell, Step
from timeloom.compile.remember import compiled_for
from timeloom.kernels import CPUSweeper, CUDASweeper
from timeloom.kernels.cpu import build
from timeloom.kernels.cpu.fused import why_not
from timeloom.nn.draws import ones_by_chance
from timeloom.problem import Recurrence
from timeloom.torch_state.transforms import transformed

Pair = tuple[float, ...]
Weights = tuple[Tensor, Tensor, *tuple[Tensor | None, ...]]
"""w_ih, w_hh, b_ih, b_hh and w_hr of one layer and direction; None if absent."""


class Dropping(NamedTuple):
    """The probabilities of dropout inside the recurrence of a module.

    state: for h before the recurrent product, one mask per sequence (variational dropout, Gal and Ghahramani, 2016).
    zoneout: for each part of the state, that a unit keeps its value over a step (Krueger et al., 2017).
    weights: for the recurrent matrix, one mask per call (weight drop; Merity et al., 2018).
    """

    state: float = 0.0
    zoneout: Pair = (0.0,)
    weights: float = 0.0

    @staticmethod
    def checked(state: Any, zoneout: Any, weights: Any, parts: int) -> Dropping:
        """Make the probabilities from a user's options; raises if one of these is invalid."""
        given = zoneout if isinstance(zoneout, tuple | list) else (zoneout,) * parts
        if len(given) != parts:
            expected = "a number" if parts == 1 else "a number, or a pair for h and c"
            raise ValueError(f"zoneout must be {expected}, got {zoneout!r}")
        return Dropping(
            check_probability("recurrent_dropout", state),
            tuple(check_probability("zoneout", part) for part in given),
            check_probability("weight_dropout", weights),
        )

    @property
    def zones(self) -> bool:
        return any(self.zoneout)

    @property
    def active(self) -> bool:
        return bool(self.state or self.zones or self.weights)

    @property
    def behind(self) -> Masks:
        """Which masks stand behind the inputs, if there are any masks."""
        return Masks(self.state > 0, self.zones)

    def masks_state(self, training: bool) -> bool:
        """Whether steps differ from torch's; with zoneout they also do in `eval()`, which uses its expectation."""
        return self.zones or (training and self.state > 0)

    def masks(self, x: Tensor, widths: Sequence[int], training: bool) -> list[Tensor]:
        """The masks that `timeloom.cells.masked` expects behind inputs x `(T, B, ·)`; `widths` of the state's parts."""
        steps, batch = x.shape[:2]
        found: list[Tensor] = []
        if self.state:
            found.append(self.sequence_mask(x, widths[0], training).expand(steps, batch, widths[0]))
        for share, width in zip(self.zoneout, widths, strict=False) if self.zones else ():
            kept = x.new_empty(steps, batch, width)
            found.append(ones_by_chance(kept, share) if training else kept.fill_(share))
        return found

    def sequence_mask(self, x: Tensor, width: int, training: bool) -> Tensor:
        """The mask `(B, width)` by which every sequence of x `(T, B, ·)` multiplies its states."""
        shown = x.new_empty(x.shape[1], width)
        return _drawn(shown, self.state) if training else shown.fill_(1)

    def drop_weights(self, w_hh: Tensor) -> Tensor:
        """A recurrent matrix with some of its entries set to zero and the others scaled up."""
        return w_hh * _drawn(w_hh.detach().new_empty(w_hh.shape), self.weights)

    def __str__(self) -> str:
        zoneout = self.zoneout[0] if len(set(self.zoneout)) == 1 else self.zoneout
        options = {"recurrent_dropout": self.state, "zoneout": zoneout, "weight_dropout": self.weights}
        return "".join(f", {name}={value}" for name, value in options.items() if value)


NOTHING = Dropping()


class DropsInside:
    """The options of dropout inside the recurrence as attributes of a module, which may be set at any time."""

    mode: str
    training: bool
    _dropping: Dropping = NOTHING
    _last: Any

    @property
    def recurrent_dropout(self) -> float:
        """In training, the share of h that is dropped before the recurrent product: the same units for all steps."""
        return self._dropping.state

    @recurrent_dropout.setter
    def recurrent_dropout(self, share: float) -> None:
        self._drop(share, self.zoneout, self.weight_dropout)

    @property
    def zoneout(self) -> float | tuple[float, ...]:
        """Probability that a unit keeps its value over a step, of h, or of h and c; its expectation in `eval()`."""
        shares = self._dropping.zoneout
        return shares[0] if len(set(shares)) == 1 else shares

    @zoneout.setter
    def zoneout(self, share: float | tuple[float, ...]) -> None:
        self._drop(self.recurrent_dropout, share, self.weight_dropout)

    @property
    def weight_dropout(self) -> float:
        """In training, the share of the recurrent matrices' entries that a call sets to zero."""
        return self._dropping.weights

    @weight_dropout.setter
    def weight_dropout(self, share: float) -> None:
        self._drop(self.recurrent_dropout, self.zoneout, share)

    def _drop(self, state: Any, zoneout: Any, weights: Any) -> None:
        """Set all options of dropout inside the recurrence."""
        given = Dropping.checked(state, zoneout, weights, 2 if self.mode == "LSTM" else 1)
        self._dropping = given if given.active else NOTHING
        self._last = None
        self._steady: dict[Any, Any] = {}

    @property
    def _masks(self) -> bool:
        """Whether steps differ from torch's at present."""
        return self._dropping.masks_state(self.training)

    @property
    def _drops(self) -> bool:
        """Whether anything is dropped inside the recurrence at present."""
        if self._dropping is NOTHING:  # nearly always: short calls count every microsecond
            return False
        return self._masks or (self.training and self._dropping.weights > 0)

    def _masks_weights(self, batch: int) -> bool:
        """Whether the mask of the states is applied to the weights instead, which is possible for a single sequence."""
        return self._masks and batch == 1 and not self._dropping.zones

    def _makes_weights(self, batch: int) -> bool:
        """Whether every call makes its own recurrent weights."""
        return self._masks_weights(batch) or (self.training and self._dropping.weights > 0)

    def _behind(self, batch: int, n: int, size: int) -> int:
        """Width of the masks behind the inputs of a layer with n units and a state of this size."""
        if not self._masks or self._masks_weights(batch):
            return 0
        masks = self._dropping.behind
        return n * masks.dropped + size * masks.zoned

    def _with_masks(self, x: Tensor, weights: Weights, widths: Sequence[int]) -> tuple[Tensor, Weights]:
        """A layer's inputs with this call's masks behind them, and its weights, with the mask of a single sequence."""
        if not self._masks:
            return x, weights
        if self._masks_weights(x.shape[1]):
            w_ih, w_hh, *others = weights
            return x, (w_ih, w_hh * self._dropping.sequence_mask(x, widths[0], self.training), *others)
        return torch.cat([x, *self._dropping.masks(x, widths, self.training)], -1), weights


def _drawn(room: Tensor, share: float) -> Tensor:
    """A dropout mask: zeros with probability `share`, the rest scaled up."""
    return room.bernoulli_(1 - share).div_(1 - share)


def check_probability(name: str, value: Any) -> float:
    """A probability below 1, or an error that says what was given."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a probability, 0 ≤ p < 1, got {type(value).__name__}")
    if not 0 <= float(value) < 1:
        raise ValueError(f"{name} must be a probability, 0 ≤ p < 1, got {value}")
    return float(value)


def masked(cell: Cell, rows: Tensor, masks: Masks) -> tuple[Cell, Tensor]:
    """One of torch's cells with masks, and its inputs, from projected inputs with masks behind them, `(T, B, ·)`.

    Uses the plain cell's kernels if these take masks, else kernels generated for it, if possible. On autograd's tape.
    """
    problem = Recurrence(cell, rows, rows[:0])
    if CPUSweeper.supports(problem) or CUDASweeper.supports(problem):
        return MaskedCell(cell, masks), rows
    step: Step = partial(STEPS[type(cell)](cell), *masks)
    start = tuple(rows.new_zeros(rows.shape[1], width) for width in cell.parts)
    inside = transformed() or torch._C._get_tracing_state() is not None
    on_cpu = rows.device.type == "cpu"
    lacking = "inside a transform or a trace" if inside else build.unavailable() if on_cpu else None
    given = lacking or compiled_for(step, start, len(start) > 1, rows)
    if not isinstance(given, str) and on_cpu:
        given = why_not(given.fused, rows.dtype) or given
    if isinstance(given, str):
        plain = GenericCell(step, start if len(start) > 1 else start[0], rows.shape[2:])
        plain.told = f"not fused: {given}"
        return plain, rows
    weights, inputs = given.prepare(step, rows.flatten(0, 1), start[0])
    fused = FusedCell(given.fused, weights)
    fused.told = "fused"
    return fused, inputs.view(*rows.shape[:2], -1)
