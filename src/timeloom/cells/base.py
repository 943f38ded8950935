"""The interface of cells, the mathematics of one step. A cell never sees a solver, a chunk or a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from timeloom.cells.coarse import Coarse, Frozen, UserStep
from timeloom.torch_state.transforms import transforms_work

SHORT_SUM = 256
"""Least terms of each short sum, by which long sums over time are made."""
MOST_SUMMED = 1 << 20
"""Most numbers in all short sums of one gradient."""


class Masks(NamedTuple):
    """Which masks of a dropout inside the recurrence stand behind `u` in every row (see `timeloom.cells.masked`)."""

    dropped: bool = False
    """A factor of h in the recurrent product, `(n,)`."""
    zoned: bool = False
    """The share of every unit that a step keeps unchanged, for each part of the state."""


NO_MASKS = Masks()


class Cell(ABC):
    """One step `s⁺ = f(s, u)` of a recurrence over projected inputs, and its derivatives.

    A state is flat, `(N, S)`: its parts (h; or h and c) side by side, part 0 being the output. `u` is `(N, K)`: the
    contribution of the input to the step, computed for all of time beforehand. Rows are independent.
    """

    parts: tuple[int, ...]
    """Widths of the state's parts; they sum to S."""
    weights: tuple[Tensor, ...]
    """Recurrent weights, in the order in which `weight_grads` returns their gradients."""
    gate_width: int
    """Width G of the gate gradients that `vjp` returns."""
    whole_state_out: bool = False
    """Whether a run returns whole states rather than only their first part."""
    has_blocks: bool = False
    """Whether the state has two parts of one width, with an entry of each for every unit, as h and c: see `blocks`."""
    kernel: str | None = None
    """Name of the fused kernel that computes this cell, where one exists (see `timeloom.kernels`)."""
    generated: bool = False
    """Whether kernels are generated from its `step`; their gate gradients are then the cell's own."""
    in_cudnn: bool = False
    """Whether it is a cell of torch's own layers, so that solutions need not be more precise than cuDNN's."""
    gated: bool = True
    """Whether part of the state bypasses the product with the weights in a step."""

    masks: Masks = NO_MASKS
    behind: int = 0
    """Width of the masks behind `u`."""
    told: str = ""
    """What reports say of its kernels, if they do not find out themselves."""

    @property
    def size(self) -> int:
        return sum(self.parts)

    @abstractmethod
    def step(self, state: Tensor, u: Tensor) -> Tensor:
        """The next state, `(N, S)`."""

    @abstractmethod
    def vjp(self, state: Tensor, u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """`Jᵀ grad` `(N, S)`, and the gate gradients `(N, G)` from which all other gradients follow."""

    @abstractmethod
    def decay(self, state: Tensor, u: Tensor) -> Tensor:
        """A diagonal approximation of the step's Jacobian, `(N, S)`: the share that each unit keeps of itself."""

    @abstractmethod
    def jacobian(self, state: Tensor, u: Tensor) -> Tensor:
        """The step's Jacobian `∂s⁺/∂s`, `(N, S, S)`."""

    def diagonal(self, state: Tensor, u: Tensor) -> Tensor:
        """The diagonal of the step's Jacobian, `(N, S)`."""
        return self.jacobian(state, u).diagonal(dim1=-2, dim2=-1)

    def estimated_diagonal(self, state: Tensor, u: Tensor, probes: int) -> Tensor:
        """Hutchinson's estimate of the Jacobian's diagonal, `(N, S)`: the mean of `v ⊙ Jᵀv` over random signs v.

        Costs `probes` products where the diagonal itself may cost S; exact where the Jacobian is diagonal.
        """
        generator = torch.Generator(device=state.device).manual_seed(0)
        total = torch.zeros_like(state)
        for _ in range(probes):
            signs = torch.randint(0, 2, state.shape, generator=generator, device=state.device).to(state.dtype) * 2 - 1
            total += signs * self.vjp(state, u, signs)[0]
        return total / probes

    def blocks(self, state: Tensor, u: Tensor) -> Tensor:
        """The diagonals of the four blocks of the Jacobian of a state of two parts, `(N, 2, 2, n)`.

        They are the derivatives of each unit's next h and c by its own h and c.
        """
        raise NotImplementedError(f"{type(self).__name__} has no blocks of 2 × 2")

    @abstractmethod
    def input_grads(self, gate_grads: Tensor) -> Tensor:
        """Gradient of `u` from the gate gradients, `(..., K)`."""

    @abstractmethod
    def weight_grads(self, previous: Sequence[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
        """Gradients of `weights` from their operands (see `multiplied`), `(N, part)` each, and the gate gradients."""

    def multiplied(self, previous: Sequence[Tensor], u: Tensor) -> Sequence[Tensor]:
        """The operands of the weights, `(N, part)` each, from the parts of the states before each step."""
        return previous

    def bound(self, initial: Tensor) -> Tensor | None:
        """A box that every trajectory from `initial` `(B, S)` stays in, as `|s| ≤ bound`, or None where none is
        known.
        """
        return None

    def coarse(self, kind: str) -> Coarse:
        """A coarse step of this kind: `frozen`, or `implicit` if the cell has one."""
        if kind == "implicit":
            raise ValueError(
                f"coarse='implicit' is for cells with an update gate (GRU, ImplicitGRU), without dropout inside the "
                f"recurrence, and this is a {type(self).__name__}: use coarse='frozen', or give a coarse step of your "
                "own"
            )
        return Frozen(self)

    def call_own(self, function: UserStep, state: Tensor, u: Tensor, span: Tensor) -> Tensor:
        """A user's own coarse step on flat states and projected inputs."""
        out = function(state, u, span)
        if not isinstance(out, Tensor) or out.shape != state.shape:
            given = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"the coarse step returned {given}, expected a state of shape {tuple(state.shape)} as it was given"
            )
        return out

    def with_weights(self, weights: tuple[Tensor, ...]) -> Cell:
        """The same cell over other weights (detached, cast): the parts and options stay."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.weights = weights
        return twin


def jacobian_by_vjp(cell: Cell, state: Tensor, u: Tensor) -> Tensor:
    """The step's Jacobian `(N, S, S)` by vjps, one row for every unit of the next state."""
    units = torch.eye(cell.size, dtype=state.dtype, device=state.device)

    def pull(unit: Tensor) -> Tensor:
        return cell.vjp(state, u, unit.expand_as(state))[0]

    if transforms_work():
        found: Tensor = torch.func.vmap(pull, out_dims=1)(units)
        return found
    return torch.stack([pull(unit) for unit in units], 1)


def unit_box(initial: Tensor) -> Tensor:
    """Box of a state that is a convex combination of itself and values in [-1, 1]."""
    return initial.abs().clamp(min=1.0)


def chain_weights(scales: Sequence[Tensor], weights: Sequence[Tensor], diagonal: Tensor | None = None) -> Tensor:
    """`Σ diag(scale) W`, plus `diag(diagonal)`, for batches of scales: `(N, n)` each, `(n, p)` each `-> (N, n, p)`.

    Computed by one product for each unit over the few terms: in memory the rows of a unit are adjacent for all items.
    """
    if diagonal is not None:
        eye = torch.eye(diagonal.shape[-1], dtype=diagonal.dtype, device=diagonal.device)
        scales, weights = (*scales, diagonal), (*weights, eye)
    terms = torch.stack(tuple(scales), -1).transpose(0, 1)
    return torch.bmm(terms, torch.stack(tuple(weights), 1)).transpose(0, 1)


def sum_outer(grads: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
    """`Σ grads[i] ⊗ values[i]`, into `out` if given: a weight's gradient from its inputs and its outputs' gradients.

    A sum of short sums on a CPU and in float64: torch may make one long sum of narrow matrices, off by 4e-6 in float32
    and 1e-14 in float64 after some 10,000 terms.
    """
    terms = len(grads)
    sums = min(terms // SHORT_SUM, MOST_SUMMED // max(1, grads.shape[1] * values.shape[1]))
    if sums < 2 or (grads.device.type != "cpu" and grads.dtype != torch.float64):
        return torch.mm(grads.t(), values, out=out)
    split = terms // sums * sums
    of_grads, of_values = (part[:split].unflatten(0, (sums, -1)) for part in (grads, values))
    total = torch.sum(torch.bmm(of_grads.transpose(1, 2), of_values), 0, out=out)
    return total if split == terms else torch.addmm(total, grads[split:].t(), values[split:], out=out)
