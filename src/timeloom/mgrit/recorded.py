"""The coarse levels on a GPU by captured CUDA graphs: hundreds of launches on small tensors, as one replay.

Everything that coarse levels read comes from a few tensors, such as inputs, weights and states, which are copied in.
What is captured makes the levels from them, and takes the first guess or a correction.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from timeloom.kernels.replay import RECORDINGS
from timeloom.mgrit.cycle import Hierarchy, coarse_levels
from timeloom.mgrit.grid import Coarsening
from timeloom.mgrit.propagators import Propagator
from timeloom.problem import Recurrence

Given = Sequence[Tensor | None]
SMALL = 1 << 22
"""Numbers in the inputs up to which launches are what coarse levels cost."""
ROOM = 64
"""Bytes of a recording for each number in the states where chunks start: a dozen tensors in float64, roughly."""


@dataclass(frozen=True)
class Coarsen:
    """Coarse levels of a problem: `make(given, coarsening)` is Φ of each of them, from tensors alone if there is a
    `key`, which is then everything else that it depends on.
    """

    given: Given
    make: Callable[[Given, Coarsening], list[Propagator]]
    key: Hashable | None = None

    def __call__(self, coarsening: Coarsening) -> list[Propagator]:
        return self.make(self.given, coarsening)


def key_of(problem: Recurrence) -> Hashable | None:
    """What coarse levels depend on beside tensors; None if they are not to be recorded."""
    cell, marked = problem.cell, problem.lengths is not None or problem.resets is not None
    if marked or not cell.weights or cell.behind or not is_launched(problem.u) or problem.u.numel() > SMALL:
        return None
    options = tuple((name, value) for name, value in vars(cell).items() if name != "weights")
    key = type(cell), options, problem.u.device
    try:
        hash(key)
    except TypeError:  # an option that is a tensor, say
        return None
    return key


def is_launched(u: Tensor) -> bool:
    """Whether every operation is a launch."""
    return u.is_cuda and u.is_floating_point()


def over(problem: Recurrence, given: Given) -> tuple[Recurrence, Given]:
    """The problem over other inputs, initial states and weights, the first of these tensors; and the rest of them."""
    u, initial, *others = given
    assert u is not None
    assert initial is not None
    count = len(problem.cell.weights)
    weights: Any = tuple(others[:count])
    return Recurrence(problem.cell.with_weights(weights) if count else problem.cell, u, initial), others[count:]


@dataclass
class Recorded:
    """Stands in for a `Hierarchy` of the same levels.

    scale: `()`, returns what the residuals of coarse levels are measured against, `(S,)`.
    """

    coarsen: Coarsen
    coarsening: Coarsening
    relaxations: tuple[int, ...]
    weight: float
    kind: str
    scale: Callable[[], Tensor]
    left: list[float] = field(default_factory=list)

    def leave(self) -> tuple[float, ...]:
        """Return and clear the residuals that the last correction left on levels 1, 2, …"""
        left, self.left = self.left, []
        return tuple(left)

    def guess(self, starts: Tensor, nested: bool) -> Tensor:
        """Chunk starts from the coarsest level up; see `Hierarchy`."""
        found, _ = self._run(("guess", nested), (starts,), lambda levels, given: levels.guess(given[0], nested))
        return found

    def correction(self, starts: Tensor, jumps: Tensor) -> Tensor:
        """The moves of the chunk starts; see `Hierarchy`."""
        found, left = self._run(("correction",), (starts, jumps), lambda levels, given: levels.correction(*given))
        self.left = [] if isinstance(left, float) else left.tolist()
        return found

    def _run(
        self, way: tuple[Hashable, ...], own: tuple[Tensor, ...], run: Callable[[Hierarchy, Any], Tensor]
    ) -> tuple[Tensor, Tensor | float]:
        """What `run` returns, and the residuals that it has left, behind one another from the finest level on."""

        def body(given: Given) -> list[Any]:
            scale, *tensors = given
            assert scale is not None
            mine, others = tensors[: len(own)], tensors[len(own) :]
            propagators = self.coarsen.make(others, self.coarsening)
            like: Any = mine[0]
            levels = coarse_levels(propagators, self.coarsening.factors[1:], self.relaxations[1:], like)
            hierarchy = Hierarchy(levels, self.weight, self.kind, partial(_size, scale))
            found = run(hierarchy, mine)
            left: list[Any] = [hierarchy.left[depth] for depth in sorted(hierarchy.left)]
            return [found, torch.stack(left).float() if left else 0.0]

        given = self.scale(), *own, *self.coarsen.given
        shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in given)
        how = self.coarsening, self.relaxations, self.weight, self.kind
        size = ROOM * own[0].numel() + sum(tensor.nbytes for tensor in given if tensor is not None)
        found, left = RECORDINGS.run(("coarse", *way, self.coarsen.key, how, shapes), given, size, body)
        return found, left


def _size(scale: Tensor, missing: Tensor) -> Tensor:
    """The largest entry of a coarse level's residual, relative to the scale."""
    return (missing.abs() / scale).amax().nan_to_num(nan=torch.inf) if missing.numel() else missing.new_zeros(())
