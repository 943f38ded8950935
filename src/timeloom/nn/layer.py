"""`Layer`: any cell over whole sequences as a module, with stacking, both directions, ragged sequences and resets."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from timeloom.auto.layer_experience import LayerExperience
from timeloom.cells.generic import GenericCell, State
from timeloom.cells.step import Step
from timeloom.compile.call import run_fused, telling
from timeloom.nn.draws import ones_by_chance
from timeloom.nn.dropping import check_probability
from timeloom.nn.reporting import Reporting
from timeloom.nn.sequence import check_lengths, check_resets, drop, mask_padding, reverse, reverse_resets
from timeloom.nn.steady_cells import KnownCalls, Run, kind_of
from timeloom.problem import Recurrence
from timeloom.report import SolveReport
from timeloom.solve.recurrence import Seen, on_tape, run
from timeloom.solve.steady_cell import SteadyCell
from timeloom.solvers.base import Solver, resolve
from timeloom.torch_state.eager import eager
from timeloom.torch_state.transforms import refuse_transforms
from timeloom.torch_state.wrapped import why_step_by_step


class Layer(Reporting):
    """A cell as a recurrent layer: `layer(x, hx)` returns the outputs of all steps and the final state, as in torch.

        layer = timeloom.Layer(timeloom.cells.SLSTM(8, 64, heads=4), num_layers=2, bidirectional=True)
        y, state = layer(x, lengths=lengths)

    cell: a `timeloom.cells.Step`; the first part of its state is the output. It becomes layer 0 in forward direction;
        the cells of other layers and directions are made by `cell.again(input_size)`. A module of your own will do if
        it has `initial(batch)`, and `again(input_size)` if more than one cell is needed.
    num_layers, bidirectional, batch_first, dropout: as in torch.nn.GRU. solver: as in timeloom.GRU.
    zoneout: the probability that a unit, in any part of the state, keeps its value over a step; `eval()` uses its
        expectation. Dropout of states or weights is left to the cell, which alone knows its products.
    """

    zoneout: float = 0.0

    def __init__(
        self,
        cell: nn.Module,
        num_layers: int = 1,
        bidirectional: bool = False,
        batch_first: bool = False,
        dropout: float = 0.0,
        solver: str | Solver = "auto",
        zoneout: float = 0.0,
    ) -> None:
        super().__init__()
        if not isinstance(cell, nn.Module) or not callable(getattr(cell, "initial", None)):
            raise TypeError(
                f"cell must be a module with initial(batch), as those of timeloom.cells, got {type(cell).__name__}: "
                "subclass timeloom.cells.Step, or use timeloom.unroll"
            )
        if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
            raise ValueError(f"num_layers must be a whole number of at least 1, got {num_layers!r}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must lie between 0 and 1, got {dropout!r}")
        directions = 2 if bidirectional else 1
        if num_layers * directions > 1 and not callable(getattr(cell, "again", None)):
            raise TypeError(
                f"{type(cell).__name__} has no again(input_size), by which the cells of other layers and directions "
                "are made: subclass timeloom.cells.Step"
            )
        self.num_layers, self.bidirectional, self.batch_first = num_layers, bidirectional, batch_first
        self.dropout, self.solver = float(dropout), solver
        self.zoneout = check_probability("zoneout", zoneout)
        resolve(solver)
        cells: list[Any] = [cell]
        while len(cells) < num_layers * directions:
            first: Any = cell
            deeper = len(cells) >= directions
            cells.append(first.again(directions * first.hidden_size if deeper else first.input_size))
        self.cells = nn.ModuleList(cells)
        self._experiences = [LayerExperience() for _ in cells]
        self._known = KnownCalls()
        self._take_reports([])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._known = KnownCalls()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._known = KnownCalls()  # weights may move, and replays must not keep the old ones alive
        return super()._apply(fn, recurse)

    @eager
    def forward(
        self, x: Tensor, hx: State | None = None, *, lengths: Tensor | None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Run all layers and directions; returns outputs `(T, B, directions · units)` and final states, shaped as hx.

        x: `(T, B, ...)`, or `(B, T, ...)` if batch_first.
        hx: initial states, each part `(layers · directions, B, ...)`; by default those of the cells' `initial`.
        lengths: `(B,)`: steps past a sequence's length are padding; their outputs are zero.
        resets: bool, `(T, B)` (or `(B, T)`): the state is set back to hx before a marked step.
        """
        plain = lengths is None and resets is None and not self.zoneout and not (self.dropout and self.training)
        options = self.solver, self.training, self.num_layers, self.bidirectional, self.batch_first
        kind = kind_of(x, hx, *options) if plain else None
        known = None if kind is None else self._known.find(kind, self.cells)
        replayed = None if known is None else self._again(known, x, hx)
        if replayed is not None:
            return replayed
        if not isinstance(x, Tensor) or x.dim() < 2:
            given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x must be a tensor of shape (T, B, ...), or (B, T, ...) if batch_first; got {given}")
        x = x.transpose(0, 1) if self.batch_first else x
        steps, batch = x.shape[:2]
        if steps == 0:
            raise ValueError("x has no time steps")
        lengths = None if lengths is None else check_lengths(lengths, steps, batch)
        resets = None if resets is None else check_resets(resets, steps, batch, self.batch_first, x.device)
        x = x if lengths is None else mask_padding(x, lengths)
        directions = 2 if self.bidirectional else 1
        self._take_reports([])
        finals: list[tuple[Tensor, ...]] = []
        runs: list[Run] = []
        is_tuple = False
        for layer in range(self.num_layers):
            outputs = []
            for index in range(layer * directions, (layer + 1) * directions):
                start = self._start(index, hx, batch)
                is_tuple = isinstance(start, tuple)
                y, final = self._run(index, x, start, lengths, resets, runs)
                outputs.append(y)
                finals.append(final)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if self.dropout and self.training and layer + 1 < self.num_layers:
                x = drop(x, self.dropout, lengths)
        if kind is not None:
            self._known.settle(kind, runs, resolve(self.solver), shown=1, ends=True)
        states = tuple(torch.stack(part) for part in zip(*finals, strict=True))
        y = x.transpose(0, 1) if self.batch_first else x
        return y, states if is_tuple else states[0]

    def _again(self, known: list[SteadyCell], x: Tensor, hx: State | None) -> tuple[Tensor, State] | None:
        """The call by replays alone; None if one is not possible or misses its certificate: all is then done anew."""
        x = x.transpose(0, 1) if self.batch_first else x
        directions, batch = 2 if self.bidirectional else 1, x.shape[1]
        calls, finals, outputs = [], [], []
        for index, steady in enumerate(known):
            backwards, call = index % directions == 1, steady.call()
            initial = None if hx is None and self._begins_at_zero(index) else self._start(index, hx, batch)
            initial = None if initial is None else steady.cell.pack(initial)
            found = steady.run(call, x.flip(0) if backwards else x, initial)
            if found is None:
                return None
            y, *final = found
            calls.append(call)
            finals.append([part.reshape(*part.shape[:-1], *shape) for part, shape in
                           zip(final, steady.cell.shapes, strict=True)])  # fmt: skip
            y = y.reshape(*y.shape[:-1], *steady.cell.shapes[0])
            outputs.append(y.flip(0) if backwards else y)
            if len(outputs) == directions:
                x, outputs = outputs[0] if directions == 1 else torch.cat(outputs, -1), []
        verdicts = [call.certify() for call in calls]
        if not all(verdicts):
            return None
        self._take_reports([], verdicts)
        states = tuple(part[0] if len(part) == 1 else torch.cat(part) for part in zip(*finals, strict=True))
        y = x.transpose(0, 1) if self.batch_first else x
        y = y if y.requires_grad else y.detach()  # no view, which users could not write into
        return y, states if steady.cell.is_tuple else states[0]

    def _begins_at_zero(self, index: int) -> bool:
        cell: Any = self.cells[index]
        return isinstance(cell, Step) and type(cell).initial is Step.initial and "initial" not in vars(cell)

    def _start(self, index: int, hx: State | None, batch: int) -> State:
        cell: Any = self.cells[index]
        zeros: State = cell.initial(batch)
        if hx is None:
            return zeros
        parts, expected = (value if isinstance(value, tuple) else (value,) for value in (hx, zeros))
        shapes = [(len(self.cells), *part.shape) for part in expected]
        given = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
        if isinstance(hx, tuple) != isinstance(zeros, tuple) or given != shapes:
            raise ValueError(f"hx has parts of shapes {given}, expected {shapes}: layers · directions, B, units")
        own = tuple(part[index] for part in parts)
        return own if isinstance(zeros, tuple) else own[0]

    def _run(
        self, index: int, x: Tensor, start: State, lengths: Tensor | None, resets: Tensor | None, runs: list[Run]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: the first part of all states, and the final state; appends the run to `runs`."""
        backwards = self.bidirectional and index % 2 == 1
        if backwards:
            x = reverse(x, lengths)
            resets = None if resets is None else reverse_resets(resets, lengths)
        step: Any = self.cells[index]
        if self.zoneout:
            parts = start if isinstance(start, tuple) else (start,)
            step = partial(_zoned, step, tuple(x.shape[2:]))
            x = self._with_masks(x, [part[0].numel() for part in parts])
        cell = GenericCell(step, start, x.shape[2:])
        problem = Recurrence(cell, x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1), cell.pack(start), lengths, resets)

        def solve(problem: Recurrence, told: str, seen: Seen | None) -> tuple[tuple[Tensor, ...], Tensor]:
            del self.reports[index:]
            record = telling(self._record(index), told)
            return run(problem, resolve(self.solver), self._experiences[index], record, parts=1, seen=seen)

        if lengths is not None or resets is not None:
            refuse_transforms("timeloom.Layer with lengths or resets", "neither of them there, or a loop over the cell")
        reason = why_step_by_step(x, problem.initial)
        if reason is not None:
            if lengths is not None or resets is not None:
                raise NotImplementedError(f"lengths= and resets= are for timeloom's own sweeps, and there are {reason}")
            (output,), final = on_tape(problem, self._record(index), reason, parts=1)
        else:
            (output,), final = run_fused(cell, problem, x, solve, resolve(self.solver).why_not_fused)
        runs.append(Run(cell, problem, x, self._experiences[index]))
        y = output.reshape(*output.shape[:-1], *cell.shapes[0])
        last = cell.unpack(final)
        return (reverse(y, lengths) if backwards else y), (last if isinstance(last, tuple) else (last,))

    def _with_masks(self, x: Tensor, widths: list[int]) -> Tensor:
        """Inputs `(T, B, K)`, followed by the share that every unit keeps of its value."""
        if not x.is_floating_point():
            raise TypeError(f"zoneout is for inputs of floating point, got {x.dtype}: embed them before the layer")
        flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)
        rooms = (flat.new_empty(*x.shape[:2], width) for width in widths)
        kept = [ones_by_chance(room, self.zoneout) if self.training else room.fill_(self.zoneout) for room in rooms]
        return torch.cat([flat, *kept], -1)

    def _record(self, index: int) -> Callable[[SolveReport], None]:
        """A function that keeps a layer's report; it is called again, without effect, after the backward pass."""
        return lambda report: self.reports.append(report) if len(self.reports) <= index else None

    def extra_repr(self) -> str:
        options = [f"num_layers={self.num_layers}"] if self.num_layers > 1 else []
        options += [name for name in ("bidirectional", "batch_first") if getattr(self, name)]
        options += [f"{name}={getattr(self, name)}" for name in ("dropout", "zoneout") if getattr(self, name)]
        return ", ".join(options)


def _zoned(cell: Callable[[Any, Tensor], Any], shape: tuple[int, ...], state: Any, row: Tensor) -> Any:
    """A cell's step with zoneout; `row` is x, followed by the share that each part of the state keeps."""
    parts = state if isinstance(state, tuple) else (state,)
    x, *kept = row.split([math.prod(shape), *(math.prod(part.shape[1:]) for part in parts)], -1)
    after = cell(state, x.reshape(len(row), *shape))
    following = after if isinstance(after, tuple) else (after,)
    mixed = tuple(
        new + share.reshape(old.shape) * (old - new) for share, old, new in zip(kept, parts, following, strict=True)
    )
    return mixed if isinstance(state, tuple) else mixed[0]
