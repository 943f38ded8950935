"""The one base of timeloom's modules: torch's layers with another forward pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from timeloom.cells.base import Cell
from timeloom.nn import native
from timeloom.nn.sequence import (
    check_lengths,
    check_resets,
    mask_padding,
    pack_like,
    reverse,
    reverse_resets,
    unpack,
)
from timeloom.problem import Recurrence
from timeloom.recurrence import run
from timeloom.report import SolveReport
from timeloom.solvers.auto import Memory
from timeloom.solvers.base import Solver
from timeloom.solvers.planning import resolve

Hidden = tuple[Tensor, ...]
"""Initial or final states, one `(layers · directions, B, part)` for each part of the state: h, or h and c."""


class Recurrent(nn.RNNBase):
    """Everything that GRU, LSTM and RNN share: parameters and checks are torch's, the forward pass is timeloom's."""

    reports: list[SolveReport]
    """One report for each layer and direction of the last call: forward and reverse of layer 0, then of layer 1, …"""

    def _start(self, solver: str | Solver) -> None:
        """What this class adds to torch's: the solver, what it learned, and the last call's reports."""
        self._solver = resolve(solver)
        self._solver_given = solver
        self._memories: dict[int, Memory] = {}
        self.reports = []

    @property
    def solver(self) -> str | Solver:
        """How to solve: a name or an object from `timeloom.solvers`. Set it at any time."""
        return self._solver_given

    @solver.setter
    def solver(self, solver: str | Solver) -> None:
        self._start(solver)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self._solver_given == "auto" else f"{text}, solver={self._solver_given!r}"

    @abstractmethod
    def _cell(self, x: Tensor, w_ih: Tensor, w_hh: Tensor, *more: Tensor | None) -> tuple[Cell, Tensor]:
        """A layer's cell and its projected inputs; `more` is b_ih, b_hh and the LSTM's w_hr, None where missing."""

    @abstractmethod
    def _hidden_in(self, hx: Any, batched: bool, batch: int, like: Tensor, permutation: Tensor | None) -> Hidden:
        """The user's initial state, checked as torch does, as a tuple of its parts; zeros where none is given."""

    @abstractmethod
    def _hidden_out(self, parts: Hidden) -> Any:
        """Final states as torch returns them."""

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Any, Any]:
        """As torch's module, and beyond it:

        lengths: `(B,)`, whole numbers: steps past a sequence's length are padding. Their outputs are zero, their inputs
            are not looked at, and the final state is the one after the last real step.
        resets: bool, `(T, B)`, or `(B, T)` if batch_first, or `(T,)` if unbatched: the state is put back to hx before a
            marked step, as if a new sequence began there (in both directions of a bidirectional module).
        """
        packed = input if isinstance(input, PackedSequence) else None
        if packed is not None and (lengths is not None or resets is not None):
            raise ValueError(
                "a PackedSequence carries its own lengths: give a padded tensor to use lengths= or resets="
            )
        data = input if packed is None else packed.data
        if not isinstance(data, Tensor):
            raise TypeError(f"input must be a Tensor or a PackedSequence, got {type(input).__name__}")
        if lengths is None and resets is None:
            reason = native.why(self, self._solver, input)
            if reason is not None:
                return self._run_native(input, hx, reason)
        return self._run_own(data, packed, hx, lengths, resets)

    def _run_native(self, input: Tensor | PackedSequence, hx: Any, reason: str) -> tuple[Any, Any]:
        """Torch's own layer: what is fastest, or what was asked for."""
        report = native.report(self, input, reason)
        result: tuple[Any, Any] = native.call(self, input, hx)
        self.reports = [report] * (self.num_layers * (2 if self.bidirectional else 1))
        return result

    def _run_own(
        self,
        data: Tensor,
        packed: PackedSequence | None,
        hx: Any,
        lengths: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Any, Any]:
        if packed is None and data.dim() not in (2, 3):
            raise ValueError(f"{self._get_name()}: Expected input to be 2D or 3D, got {data.dim()}D instead")
        self.check_input(data, None if packed is None else packed.batch_sizes)
        batched = packed is not None or data.dim() == 3
        if packed is not None:
            x, lengths = unpack(packed)
        else:
            x = data if batched else data.unsqueeze(1)
            x = x.transpose(0, 1) if self.batch_first and batched else x
        steps, batch = x.shape[:2]
        permutation = None if packed is None else packed.sorted_indices
        hidden = self._hidden_in(hx, batched, batch, x, permutation)
        if lengths is not None:
            lengths = lengths if packed is not None else check_lengths(lengths, steps, batch)
            x = x if packed is not None else mask_padding(x, lengths)
        if resets is not None:
            resets = resets if batched or not isinstance(resets, Tensor) else resets.unsqueeze(1)
            resets = check_resets(resets, steps, batch, self.batch_first and batched, x.device)
        y, final = self._solve(x, hidden, lengths, resets)
        if packed is not None:
            final = tuple(self.permute_part(part, packed.unsorted_indices) for part in final)
            return pack_like(y, lengths, packed), self._hidden_out(final)  # type: ignore[arg-type]
        if not batched:
            return y.squeeze(1), self._hidden_out(tuple(part.squeeze(1) for part in final))
        return y.transpose(0, 1) if self.batch_first else y, self._hidden_out(final)

    @staticmethod
    def permute_part(part: Tensor, permutation: Tensor | None) -> Tensor:
        return part if permutation is None else part.index_select(1, permutation)

    def _solve(self, x: Tensor, hidden: Hidden, lengths: Tensor | None, resets: Tensor | None) -> tuple[Tensor, Hidden]:
        """All layers: x `(T, B, D)` to outputs `(T, B, directions · part)` and final states."""
        compute, returned = native.dtypes(self, x)
        reports: list[SolveReport] = [None] * (self.num_layers * (2 if self.bidirectional else 1))  # type: ignore[list-item]
        self.reports = reports
        finals: list[Tensor] = []
        with torch.autocast(x.device.type, enabled=False):
            y = x.to(compute)
            for layer in range(self.num_layers):
                outputs = []
                for direction in range(2 if self.bidirectional else 1):
                    index = len(finals)
                    initial = torch.cat([part[index] for part in hidden], -1).to(compute)
                    out, final = self._solve_one(
                        y, initial, lengths, resets, layer, direction, _recorder(reports, index)
                    )
                    outputs.append(out)
                    finals.append(final)
                y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
                if self.dropout > 0 and self.training and layer < self.num_layers - 1:
                    y = F.dropout(y, self.dropout, training=True)
        parts = torch.stack(finals).to(returned).split([part.shape[-1] for part in hidden], -1)
        return y.to(returned), parts

    def _solve_one(
        self, x: Tensor, initial: Tensor, lengths: Tensor | None, resets: Tensor | None, layer: int, direction: int,
        record: Callable[[SolveReport], None],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One layer in one direction."""
        suffix = f"_l{layer}" + ("_reverse" if direction else "")
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        found = (getattr(self, name + suffix, None) for name in names)
        w_ih, w_hh, *more = (weight if weight is None else weight.to(x.dtype) for weight in found)
        assert w_ih is not None
        assert w_hh is not None
        if direction:
            x = reverse(x, lengths)
            resets = None if resets is None else reverse_resets(resets, lengths)
        cell, u = self._cell(x, w_ih, w_hh, *more)
        memory = self._memories.setdefault(2 * layer + direction, Memory())
        y, final = run(Recurrence(cell, u, initial, lengths, resets), self._solver, memory, record)
        return reverse(y, lengths) if direction else y, final


def _recorder(reports: list[SolveReport], index: int) -> Callable[[SolveReport], None]:
    def record(report: SolveReport) -> None:
        reports[index] = report

    return record
