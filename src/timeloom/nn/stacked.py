"""The layers and directions of a module: their weights, their experience, and how each one is solved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from timeloom.auto.layer_experience import LayerExperience
from timeloom.cells.base import Cell, Masks
from timeloom.distributed.solve import Ranks
from timeloom.distributed.span import Span
from timeloom.distributed.trunk import RankSolve
from timeloom.nn.dropping import DropsInside, Weights, masked
from timeloom.nn.sequence import drop, reverse, reverse_resets
from timeloom.problem import joined, parts_of
from timeloom.solve.inputs import Inputs
from timeloom.solve.trunk import LayerSolve
from timeloom.solvers.base import Solver
from timeloom.torch_state.precision import cast, solved_in

Hidden = tuple[Tensor, ...]
"""Initial or final states, one `(layers · directions, B, part)` for each part of the state: h, or h and c."""
SolveOne = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`solve_one(index, x, initial)`: outputs `(T, B, ·)` and final state `(B, S)` of one layer in one direction."""


class Stacked(DropsInside, nn.RNNBase):
    """Stacked layers in one or two directions, with torch's parameters.

    Forward and reverse of layer 0, then of layer 1, … have the indices 0, 1, 2, …
    """

    has_torch_twin = True
    """Whether torch has the same layer, which can run if it is faster."""
    _solver: Solver
    _experiences: dict[int, LayerExperience]

    @abstractmethod
    def _bare(self, *weights: Any) -> Cell:
        """A layer's cell; `weights` as in `Weights`."""

    @abstractmethod
    def _cell(self, x: Tensor, *weights: Any) -> tuple[Cell, Tensor]:
        """A layer's cell and its projected inputs; `weights` as in `Weights`."""

    @property
    def _stacked(self) -> int:
        """Layers times directions: the number of recurrences to solve."""
        return self.num_layers * (2 if self.bidirectional else 1)

    def _suffix(self, index: int) -> str:
        """The suffix of the parameter names of one layer and direction."""
        layer, direction = divmod(index, 2 if self.bidirectional else 1)
        return f"_l{layer}" + ("_reverse" if direction else "")

    def _weights_of(self, index: int) -> Weights:
        """Present weights of one layer and direction, parametrizations evaluated."""
        suffix = self._suffix(index)
        w_ih, w_hh = self._weight("weight_ih" + suffix), self._weight("weight_hh" + suffix)
        b_ih = self._weight("bias_ih" + suffix) if self.bias else None
        b_hh = self._weight("bias_hh" + suffix) if self.bias else None
        w_hr = self._weight("weight_hr" + suffix) if self.proj_size else None
        return w_ih, w_hh, b_ih, b_hh, w_hr

    def _weight(self, name: str) -> Any:
        """A parameter without torch's attribute lookup, which takes a microsecond; or whatever replaces it."""
        held = self._parameters.get(name)
        return getattr(self, name) if held is None else held

    def _present_weights(self) -> list[Weights]:
        """The weights of all layers and directions, in training with this call's weight dropout."""
        found = [self._weights_of(index) for index in range(self._stacked)]
        if not (self._dropping.weights and self.training):
            return found
        return [(w_ih, self._dropping.drop_weights(w_hh), *others) for w_ih, w_hh, *others in found]

    @property
    def _has_kernels(self) -> bool:
        """Whether there are kernels for its cell on some device."""
        return self.has_torch_twin and self.proj_size == 0

    def experiences(self) -> list[LayerExperience]:
        """The experience with every layer and direction that has been solved."""
        return list(self._experiences.values())

    def _solve_of(self, index: int, known: dict[int, LayerExperience], span: Span | None = None) -> LayerSolve:
        """The solve of one layer and direction; `known` holds the experience with each."""
        experience = known.get(index) or known.setdefault(index, LayerExperience())
        if span is None:
            masks = self._dropping.behind
            return LayerSolve(self._bare, partial(self._project, masks), self._solver, experience, index, masks)
        ranks = Ranks(span, self.bidirectional and index % 2 == 1, index)
        return RankSolve(self._bare, self._cell, self._solver, experience, index, ranks=ranks)

    def _project(self, masks: Masks, x: Tensor, *weights: Any) -> tuple[Cell, Tensor]:
        """A layer's cell and its projected inputs; x may have masks behind it."""
        cell, inputs = self._cell(x, *weights)
        return (cell, inputs) if x.shape[-1] == weights[0].shape[1] else masked(cell, inputs, masks)

    @staticmethod
    def _inputs(
        x: Tensor, initial: Tensor, weights: Weights, lengths: Tensor | None, resets: Tensor | None, backwards: bool,
        span: Span | None = None,
    ) -> Inputs:  # fmt: skip
        """The inputs of one layer and direction, in the order in which it runs through time."""
        if backwards:
            x = reverse(x, lengths)
            if resets is not None:
                following = None if span is None else span.following(resets[0])
                resets = reverse_resets(resets, lengths, following)
        own: Any = [None if weight is None else cast(weight, x.dtype) for weight in weights]
        return Inputs._make([x, initial, *own, lengths, resets])

    def _run_layers(
        self, y: Tensor, hidden: Hidden, solve_one: SolveOne, lengths: Tensor | None = None
    ) -> tuple[Tensor, Hidden]:
        """Run all layers and directions one after the other, each by `solve_one`."""
        compute = y.dtype
        finals: list[Tensor] = []
        for layer in range(self.num_layers):
            outputs = []
            for _ in range(2 if self.bidirectional else 1):
                index = len(finals)
                initial = cast(joined([part[index] for part in hidden]), solved_in(y))
                out, final = solve_one(index, y, initial)
                outputs.append(cast(out, compute))
                finals.append(final)
            y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout > 0 and self.training and layer < self.num_layers - 1:
                y = drop(y, self.dropout, lengths)
        widths = tuple(part.shape[-1] for part in hidden)
        parts = zip(*(parts_of(final, widths) for final in finals), strict=True)
        return y, tuple(torch.stack(part) for part in parts)  # copies, so that users can write into them
