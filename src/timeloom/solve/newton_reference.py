"""Newton's method on all states at once, chunk by chunk, in plain torch: the twin of the fused CUDA kernels.

With states s guessed,

    f[t] = f(s[t-1], u[t])    J[t] = ∂f/∂s    δ[t] = J[t] δ[t-1] + f[t] − s[t]    s ← s + δ,

and backwards `λ[t-1] = J[t]ᵀ (λ[t] + incoming[t])`. Both are affine from step to step, so a chunk of steps is one
affine map `v → A v + b`. `compose` makes the maps of all chunks side by side, `chain` runs through them, and a last
walk over the chunks (`apply` forward, an adjoint sweep backward) computes all steps inside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.kernels.newton import Maps, NewtonSteps, States
from timeloom.problem import Recurrence, joined, parts_of
from timeloom.solve.residual import SHARE_OF_BOX, certificate, floors, relative, scales


class NewtonReference(NewtonSteps):
    """Newton steps of a problem whose sequences have equal length and no resets."""

    def __init__(self, problem: Recurrence, chunk: int = 8) -> None:
        super().__init__(problem.steps, chunk)
        self.problem, self.cell = problem, problem.cell

    def compose(self, states: States | None, residual: Tensor) -> Maps:
        """The maps of δ over all chunks; `residual` `()` receives the largest relative residual of these states.

        states: None for the initial state everywhere.
        """
        previous, guess = self._around(states)
        following, elements = self._evaluate(previous), self.cell.jacobian(previous.flatten(0, 1), self._inputs())
        residual.copy_(self._residual(following, guess))
        return self._composed(elements.view(*previous.shape, -1), following - guess, range(self.problem.steps))

    def chain(self, maps: Maps, first: Tensor | None = None) -> Tensor:
        """The start of each link, `(C, B, S)`, if the first one starts from `first` `(B, S)` or zero."""
        v = torch.zeros_like(maps.sources[0]) if first is None else first
        starts = []
        for matrix, source in zip(*maps, strict=True):
            starts.append(v)
            v = (matrix @ v.unsqueeze(-1)).squeeze(-1) + source
        return torch.stack(starts)

    def correct(self, maps: Maps, starts: Tensor, ends: Tensor) -> Tensor:
        """Starts `(C, B, S)` of a linear chain, corrected for the jumps from the ends of the links before them."""
        jumps = torch.zeros_like(starts)
        jumps[:-1] = ends[:-1] - starts[1:]
        return starts + self.chain(Maps(maps.matrices, jumps))

    def apply(self, states: States | None, starts: Tensor) -> States:
        """States moved by δ, clamped to the cell's box if it has one; `starts` are the δ before every chunk."""
        previous, guess = self._around(states)
        following, rows = self._evaluate(previous), self._inputs()
        elements = self.cell.jacobian(previous.flatten(0, 1), rows).view(*previous.shape, -1)
        moves: list[Tensor] = []
        for t in range(self.problem.steps):
            before = starts[t // self.chunk] if t % self.chunk == 0 else moves[-1]
            moves.append((elements[t] @ before.unsqueeze(-1)).squeeze(-1) + following[t] - guess[t])
        found = torch.cat([self.problem.initial.unsqueeze(0), guess + torch.stack(moves)])
        bound = self.cell.bound(self.problem.initial)
        if bound is not None:
            found = torch.clamp(found, -bound, bound)
        return [part.contiguous() for part in parts_of(found, self.cell.parts)]

    def finish(self, states: States | None, residual: Tensor) -> States:
        """Every step evaluated once more: the states that follow, and the residual of the given ones."""
        previous, guess = self._around(states)
        following = self._evaluate(previous)
        residual.copy_(self._residual(following, guess))
        found = torch.cat([self.problem.initial.unsqueeze(0), following])
        return [part.contiguous() for part in parts_of(found, self.cell.parts)]

    def compose_adjoint(self, states: States, incoming: Tensor | None) -> Maps:
        """The maps of gradients over all chunks, last one first; `incoming` is `(T, B, n)` or None."""
        previous, _ = self._around(states)
        elements = self.cell.jacobian(previous.flatten(0, 1), self._inputs()).view(*previous.shape, -1).mT
        sources = torch.zeros_like(previous)
        if incoming is not None:
            width = incoming.shape[-1]
            sources = (elements[..., :width] @ incoming.unsqueeze(-1)).squeeze(-1)
        return self._composed(elements, sources, range(self.problem.steps - 1, -1, -1))

    def _composed(self, elements: Tensor, sources: Tensor, times: range) -> Maps:
        """The maps of chunks from those of steps; `times` is the order in which steps are taken."""
        batch, size = sources.shape[1:]
        matrices, found = {}, {}
        for t in times:
            link = t // self.chunk
            if link not in matrices:
                matrices[link] = torch.eye(size, dtype=sources.dtype, device=sources.device).expand(batch, -1, -1)
                found[link] = torch.zeros_like(sources[0])
            matrices[link] = elements[t] @ matrices[link]
            found[link] = (elements[t] @ found[link].unsqueeze(-1)).squeeze(-1) + sources[t]
        return Maps(torch.stack([*matrices.values()]), torch.stack([*found.values()]))

    def _around(self, states: States | None) -> tuple[Tensor, Tensor]:
        """States before and after every step, `(T, B, S)`."""
        steps, initial = self.problem.steps, self.problem.initial
        if states is None:
            whole = initial.expand(steps + 1, *initial.shape)
        else:
            whole = torch.cat([initial.unsqueeze(0), joined(states)[1:]])
        return whole[:-1], whole[1:]

    def _inputs(self) -> Tensor:
        return self.problem.u.flatten(0, 1)

    def _evaluate(self, previous: Tensor) -> Tensor:
        return self.cell.step(previous.flatten(0, 1), self._inputs()).view(previous.shape)

    def _residual(self, following: Tensor, guess: Tensor) -> Tensor:
        """The residual as `solve.residual` measures it for chunks of one step."""
        cell, initial = self.cell, self.problem.initial
        floor = floors(cell.bound(initial), initial, cell.parts, SHARE_OF_BOX)
        scale = scales(guess, following, cell.parts, floor, whole_box=True)
        return certificate(relative(following - guess, scale, cell.parts))
