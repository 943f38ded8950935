"""What a solver may ask of a recurrence's mathematics. A cell never sees a solver, a chunk or a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from timeloom.cells.coarse import Coarse, Frozen, UserStep
from timeloom.torch_state.transforms import transforms_work

SHORT_SUM = 256
"""Terms of a sum over time that are summed one after the other, at least."""
MOST_SUMMED = 1 << 20
"""Numbers in all short sums of one gradient, at most."""


class Masks(NamedTuple):
    """Which masks of a dropout inside the recurrence stand behind `u` in every row (see `timeloom.cells.masked`)."""

    dropped: bool = False
    """What h is multiplied by before the recurrent product, `(n,)`."""
    zoned: bool = False
    """The share of every unit that a step keeps as it was, a part of the state each."""


NO_MASKS = Masks()


class Cell(ABC):
    """One step `s⁺ = f(s, u)` of a recurrence over projected inputs, and its derivatives.

    A state is flat, `(N, S)`: its parts (h; or h and c) side by side, part 0 being the output. `u` is `(N, K)`: what
    the input contributes to the step, computed for all of time beforehand. Rows are independent.
    """

    parts: tuple[int, ...]
    """Widths of the state's parts; they sum to S."""
    weights: tuple[Tensor, ...]
    """Recurrent weights: what `weight_grads` returns the gradients of, in this order."""
    gate_width: int
    """Width G of the gate gradients that `vjp` returns."""
    whole_state_out: bool = False
    """Whether a run returns whole states, and not their first part alone."""
    has_blocks: bool = False
    """Whether the state is two parts of one width of which every unit has one each, as h and c: see `blocks`."""
    kernel: str | None = None
    """Name of the fused kernel that computes this cell, where one exists (see `timeloom.kernels`)."""
    generated: bool = False
    """Whether kernels are generated from its `step`, whose gate gradients are then the cell's own."""
    in_cudnn: bool = False
    """Whether it is a cell of torch's own layers: solutions need not be more precise than cuDNN's, then."""
    gated: bool = True
    """Whether part of a state passes a step by, rather than all of it through the product with the weights."""

    masks: Masks = NO_MASKS
    behind: int = 0
    """Width of the masks behind `u`."""
    told: str = ""
    """What reports say of its kernels, where that is not known from the cell."""

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
        """A diagonal stand-in for the step's Jacobian, `(N, S)`: what each unit keeps of itself."""

    @abstractmethod
    def jacobian(self, state: Tensor, u: Tensor) -> Tensor:
        """The step's Jacobian `∂s⁺/∂s`, `(N, S, S)`."""

    def diagonal(self, state: Tensor, u: Tensor) -> Tensor:
        """The diagonal of the step's Jacobian, `(N, S)`."""
        return self.jacobian(state, u).diagonal(dim1=-2, dim2=-1)

    def estimated_diagonal(self, state: Tensor, u: Tensor, probes: int) -> Tensor:
        """The diagonal of the Jacobian as Hutchinson estimates it, `(N, S)`: the mean of `v ⊙ Jᵀv` over random signs v.

        Costs `probes` products where the diagonal itself may cost S; exact where the Jacobian is diagonal.
        """
        generator = torch.Generator(device=state.device).manual_seed(0)
        total = torch.zeros_like(state)
        for _ in range(probes):
            signs = torch.randint(0, 2, state.shape, generator=generator, device=state.device).to(state.dtype) * 2 - 1
            total += signs * self.vjp(state, u, signs)[0]
        return total / probes

    def blocks(self, state: Tensor, u: Tensor) -> Tensor:
        """The diagonals of the four parts of the Jacobian of a state of two parts, `(N, 2, 2, n)`: what each unit's own
        h and c do to one another.
        """
        raise NotImplementedError(f"{type(self).__name__} has no blocks of 2 × 2")

    @abstractmethod
    def input_grads(self, gate_grads: Tensor) -> Tensor:
        """Gradient of `u` from the gate gradients, `(..., K)`."""

    @abstractmethod
    def weight_grads(self, previous: Sequence[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
        """Gradients of `weights` from what they are `multiplied` by, `(N, part)` each, and the gate gradients."""

    def multiplied(self, previous: Sequence[Tensor], u: Tensor) -> Sequence[Tensor]:
        """What weights are multiplied by, `(N, part)` each, of the parts of the states before each step."""
        return previous

    def bound(self, initial: Tensor) -> Tensor | None:
        """A box that every trajectory from `initial` `(B, S)` stays in, as `|s| ≤ bound`, or None where none is
        known.
        """
        return None

    def coarse(self, kind: str) -> Coarse:
        """A step over many steps, of this kind: `frozen`, or `implicit` where the cell has one."""
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
    """The step's Jacobian `(N, S, S)`, of a cell that has its vjp alone: a row for every unit of the next state."""
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

    One product for each unit, over the few terms; so in memory the rows of one unit lie side by side, for all items.
    """
    if diagonal is not None:
        eye = torch.eye(diagonal.shape[-1], dtype=diagonal.dtype, device=diagonal.device)
        scales, weights = (*scales, diagonal), (*weights, eye)
    terms = torch.stack(tuple(scales), -1).transpose(0, 1)
    return torch.bmm(terms, torch.stack(tuple(weights), 1)).transpose(0, 1)


def sum_outer(grads: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
    """`Σ grads[i] ⊗ values[i]`: the gradient of a weight that maps values to what grads belong to, into `out` if given.

    On a CPU a sum of short sums: of narrow matrices torch makes one long sum, off by 4e-6 after some 10,000 terms.
    """
    terms = len(grads)
    sums = min(terms // SHORT_SUM, MOST_SUMMED // max(1, grads.shape[1] * values.shape[1]))
    if sums < 2 or grads.device.type != "cpu":
        return torch.mm(grads.t(), values, out=out)
    split = terms // sums * sums
    of_grads, of_values = (part[:split].unflatten(0, (sums, -1)) for part in (grads, values))
    total = torch.sum(torch.bmm(of_grads.transpose(1, 2), of_values), 0, out=out)
    return total if split == terms else torch.addmm(total, grads[split:].t(), values[split:], out=out)
