"""The interface of kernels for whole layers: from x and torch's parameters to states, and back to gradients."""

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
"""Gradients of x, the initial state and the weights."""


@dataclass(frozen=True)
class Cutting:
    """How time is cut: steps of a chunk and of the warm-up before it, and the number of sweeps.

    A single chunk of T steps is the plain recurrence.
    """

    chunk: int
    warmup: int
    sweeps: int = 1
    dense: bool = False
    """Whether gradients at chunk ends are found by dense transfers, where the kernels have them."""
    newton: int | None = None
    """Number of Newton steps on all states at once, in place of sweeps, for a layer that `has_newton`; for gradients,
    number of sweeps after a scan over the maps of chunks."""
    retry: Cutting | None = None
    """The same chunks behind a longer warm-up, which a recorded pass that misses its certificate tries first."""
    has_missed: bool = False
    """Whether earlier calls have missed a certificate. Only then do graphs that users capture hold the retry, too: it
    costs some short launches, which count there."""

    @property
    def limit(self) -> float:
        """The bound that the certificate must not exceed."""
        return math.inf


@dataclass(frozen=True)
class NewtonCutting(Cutting):
    """A cutting for Newton steps, whose last residual must be within the tolerance."""

    tolerance: float = math.inf

    @property
    def limit(self) -> float:
        return self.tolerance


@dataclass
class Found:
    """What a sweep found at chunk boundaries, `(C·B, S)` each, for a solver that continues from there.

    Kernels fill in what they have.
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
    """bool `(T, B)`: marks steps before which a sequence is reset to its initial state; see `takes_resets`."""

    corrects: ClassVar[bool] = False
    """Whether it can correct chunk starts and sweep again."""
    takes_masks: ClassVar[bool] = False
    """Whether it accepts masks behind x (`timeloom.cells.masked`)."""
    takes_resets: ClassVar[bool] = False
    """Whether it accepts resets inside sequences."""
    begins_anywhere: ClassVar[bool] = False
    """Whether its chunks can be entered from known states."""

    @staticmethod
    @abstractmethod
    def supports(x: Tensor, cell: Cell) -> bool:
        """Whether there are kernels for a layer of this cell on this input."""

    @staticmethod
    @abstractmethod
    def tape_width(cell: Cell) -> int:
        """Numbers per step that are saved for `backward` beside the states; 0 if none are."""

    @staticmethod
    def tape_dtype(x: Tensor) -> torch.dtype:
        """The dtype of the tape."""
        return x.dtype

    @abstractmethod
    def sweeper(
        self, problem: Recurrence, keep: bool, tape: list[Tensor] | None = None
    ) -> tuple[ReferenceSweeper, list[Tensor]]:
        """A sweeper for a solver that corrects this layer's sweeps, and the tape it saves for `backward`.

        tape: one that a sweep has filled already; else a new one, if anything is to be saved.
        """

    @abstractmethod
    def forward(
        self, cutting: Cutting, share_of_box: float, keep: bool, found: Found | None = None
    ) -> tuple[list[Tensor], Tensor | float]:
        """States of h and c `(T + 1, B, n)`, followed by the tape for `backward`, and a certificate.

        The certificate is, after one sweep, the largest relative jump between chunks; after several, with corrections
        by the decay between them, the largest relative error of a chunk start, estimated by one more correction; for
        Newton steps, the largest relative residuals before each of them and after the last. `found` receives the
        values at chunk boundaries. A layer that `begins_anywhere` takes `entry=`, an `Entry`: where its chunks are
        entered.
        """

    @abstractmethod
    def backward(
        self, cutting: Cutting, kept: list[Tensor], grads: tuple[Tensor | None, Tensor | None], want_x: bool
    ) -> tuple[Gradients, Tensor | float]:
        """Gradients of x (if wanted), the initial state, w_ih, w_hh, b_ih and b_hh, and a certificate as in `forward`.

        kept: what `forward` returned. grads: the loss's gradients with respect to the outputs `(T, B, n)` and the final
        state `(B, S)`.
        """

    def recordable(self, cutting: Cutting) -> bool:
        """Whether its passes may be captured as CUDA graphs: they launch kernels on a GPU, few enough for one graph."""
        return False

    @property
    def has_newton(self) -> bool:
        """Whether there are kernels for Newton steps on this layer."""
        return False

    @property
    def fresh(self) -> dict[str, Tensor]:
        """Resets, and weights by name that are computed for each call, not parameters: their addresses change."""
        held = {name: getattr(self, name) for name in ("w_ih", "w_hh", "b_ih", "b_hh", "resets")}
        return {name: one for name, one in held.items() if one is not None and not isinstance(one, nn.Parameter)}

    def over(self, x: Tensor, initial: Tensor, fresh: Iterable[Tensor]) -> Self:
        """The same layer with other inputs, fresh weights and resets."""
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
        """Initial guess of gradients at chunk ends, last chunk first: the loss's at the final state, else zero."""
        batch, width = self.initial.shape
        if final is None:
            return self.initial.new_zeros(links * batch, width)
        return final if links == 1 else torch.cat([final, final.new_zeros((links - 1) * batch, width)])

    def bias(self) -> Tensor | None:
        """The sum of the gates' biases, without a GRU's b_hn, which the reset gate multiplies."""
        if self.b_ih is None or self.b_hh is None:
            return None
        if self.kernel != "gru":
            return self.b_ih + self.b_hh
        bias = self.b_ih.clone()
        bias[: 2 * self.n].add_(self.b_hh[: 2 * self.n])
        return bias
