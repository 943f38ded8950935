"""A whole layer, from x and torch's parameters to states and back to the gradients of both: what kernels offer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from timeloom.cells.base import Cell
from timeloom.kernels.reference import ReferenceSweeper
from timeloom.problem import Recurrence

Gradients = tuple[Tensor | None, ...]
"""Of x, the initial state and the weights."""


@dataclass(frozen=True)
class Cutting:
    """How time is cut: into chunks, which are entered by so many steps of warm-up and swept so many times. A chunk of T
    is the plain recurrence.
    """

    chunk: int
    warmup: int
    sweeps: int = 1
    dense: bool = False
    """Whether gradients at chunk ends are found by dense transfers, where the kernels have them."""
    newton: int | None = None
    """Newton's steps on all states at once, in place of sweeps, where a layer makes them (`has_newton`); of gradients,
    sweeps behind a scan over the maps of chunks."""
    retry: Cutting | None = None
    """The same chunks behind a longer warm-up, which a recorded pass that misses its certificate tries first."""

    @property
    def limit(self) -> float:
        """What the certificate must not exceed."""
        return math.inf


@dataclass(frozen=True)
class NewtonCutting(Cutting):
    """The same of Newton's steps, whose last residual is to be within the tolerance."""

    tolerance: float = math.inf

    @property
    def limit(self) -> float:
        return self.tolerance


@dataclass
class Found:
    """What a sweep over all chunks found at their boundaries `(C·B, S)`, for a solver that goes on from there. Kernels
    fill in what they have.
    """

    starts: Tensor | None = None
    ends: Tensor | None = None
    decay: Tensor | None = None
    u: Tensor | None = None
    """Projected inputs `(T, B, K)`."""


@dataclass(frozen=True)
class Layer(ABC):
    """One layer in one direction: its cell, x `(T, B, D)`, the initial state `(B, S)` and torch's parameters."""

    cell: Cell
    x: Tensor
    initial: Tensor
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    resets: Tensor | None = None
    """bool `(T, B)`: steps before which a sequence begins anew, of kernels that take them."""

    corrects: ClassVar[bool] = False
    """Whether it can make more than one sweep."""
    takes_masks: ClassVar[bool] = False
    """Whether masks may stand behind x (`timeloom.cells.masked`)."""
    takes_resets: ClassVar[bool] = False
    """Whether sequences may begin anew inside."""
    begins_anywhere: ClassVar[bool] = False
    """Whether its chunks can be entered from known states."""

    @staticmethod
    @abstractmethod
    def supports(x: Tensor, cell: Cell) -> bool:
        """Whether there are kernels for a layer of this cell on this input."""

    @staticmethod
    @abstractmethod
    def tape_width(cell: Cell) -> int:
        """Numbers a step that are kept for `backward` beside the states; 0 where nothing is."""

    @staticmethod
    def tape_dtype(x: Tensor) -> torch.dtype:
        """What these are kept in."""
        return x.dtype

    @abstractmethod
    def sweeper(
        self, problem: Recurrence, keep: bool, tape: list[Tensor] | None = None
    ) -> tuple[ReferenceSweeper, list[Tensor]]:
        """For a solver that corrects this layer's sweeps: a sweeper that keeps what `backward` needs beside the states,
        in `tape` where a sweep has filled one already, and that tape.
        """

    @abstractmethod
    def forward(
        self, cutting: Cutting, share_of_box: float, keep: bool, found: Found | None = None
    ) -> tuple[list[Tensor], Tensor | float]:
        """States of h and c `(T + 1, B, n)`, what is kept for `backward` behind them, and a certificate: behind one
        sweep the largest relative jump between chunks; behind more, with corrections by the decay between them, the
        largest relative error of a chunk's start, as one more correction tells it; of Newton's steps, the largest
        relative residuals before each of them and behind the last. `found` receives what was found at the boundaries.
        A layer that `begins_anywhere` takes `entry=`, an `Entry`: where its chunks are entered.
        """

    @abstractmethod
    def backward(
        self, cutting: Cutting, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None], want_x: bool
    ) -> tuple[Gradients, Tensor | float]:
        """Gradients of x (when wanted), the initial state, w_ih, w_hh, b_ih and b_hh, and a certificate as `forward`'s.

        `kept` is what `forward` returned; `grads` are the loss's, by the outputs `(T, B, n)` and by the final state
        `(B, S)`.
        """

    def recordable(self, cutting: Cutting) -> bool:
        """Whether its passes may be recorded as CUDA graphs and replayed: where they launch kernels on a GPU, and not
        too many for one graph.
        """
        return False

    @property
    def has_newton(self) -> bool:
        """Whether there are kernels for Newton's steps on this layer."""
        return False

    @property
    def fresh(self) -> dict[str, Tensor]:
        """Weights by name that were made for one call, rather than parameters, and resets: those of the next one lie
        elsewhere.
        """
        held = {name: getattr(self, name) for name in ("w_ih", "w_hh", "b_ih", "b_hh", "resets")}
        return {name: one for name, one in held.items() if one is not None and not isinstance(one, nn.Parameter)}

    def over(self, x: Tensor, initial: Tensor, fresh: Iterable[Tensor]) -> Self:
        """The same layer over other inputs, fresh weights and resets."""
        twin = replace(self, x=x, initial=initial, **dict(zip(self.fresh, fresh, strict=True)))  # type: ignore[arg-type]
        w_hh, n, units = twin.w_hh, twin.n, twin.cell.weights[1:]
        if twin.kernel == "gru":
            units = (w_hh.new_zeros(n) if twin.b_hh is None else twin.b_hh[2 * n :],)
        return replace(twin, cell=twin.cell.with_weights((w_hh, *units)))

    @cached_property
    def n(self) -> int:
        return self.w_hh.shape[1]

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Widths of the state's parts: h, or h and c."""
        return (self.n,) * (self.initial.shape[1] // self.n)

    @property
    def kernel(self) -> str:
        return str(self.cell.kernel)

    def at_ends(self, final: Tensor | None, links: int) -> Tensor:
        """Gradients at the ends of chunks, last one first, before any is known but the loss's by the final state."""
        batch, width = self.initial.shape
        if final is None:
            return self.initial.new_zeros(links * batch, width)
        return final if links == 1 else torch.cat([final, final.new_zeros((links - 1) * batch, width)])

    def bias(self) -> Tensor | None:
        """What is added to the gates' arguments: all biases but the GRU's b_hn, inside its reset's product."""
        if self.b_ih is None or self.b_hh is None:
            return None
        if self.kernel != "gru":
            return self.b_ih + self.b_hh
        bias = self.b_ih.clone()
        bias[: 2 * self.n].add_(self.b_hh[: 2 * self.n])
        return bias
