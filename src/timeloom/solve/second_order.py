"""Gradients that can be differentiated again: the adjoint solve as an autograd Function.

With `h[t] = F(p[t], u[t], W)`, where p is the state before a step, the gradients of a loss are `Fᵤᵀ a` and `F_Wᵀ a`,
with the adjoints `a[t] = g[t] + J[t+1]ᵀ a[t+1]`. Differentiated once more in a direction v, they take one solve of each
kind:

    tangents, forward in time:    δ[t] = J[t] δ[t-1] + Fᵤ vᵤ + F_W v_W
    adjoints, backward in time:   of `⟨a, F_p δ + Fᵤ vᵤ + F_W v_W⟩`, differentiated by p, u and W

δ is the gradient with respect to g. Everything else is one evaluation of all steps side by side, on autograd's tape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.cells.generic import GenericCell
from timeloom.kernels import sweeper as choose_sweeper
from timeloom.problem import Recurrence
from timeloom.solve.backward import previous_states, solve_adjoint
from timeloom.solve.driver import march
from timeloom.solve.forward import final_state, solve_states
from timeloom.solve.plan import MOST_SWEEPS, Plan
from timeloom.solve.tolerance import default_tolerance
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.batched import one_by_one

SHORTEST_CHUNK, WARMUP = 64, 48
"""Fewest steps in a chunk, and steps of a warm-up, for these solves, about which nothing is learned."""
Grads = Sequence[Tensor | None]
"""The loss's gradients with respect to the outputs `(T, B, ≤ S)` and the final state `(B, S)`."""
Project = Callable[..., tuple[Any, Tensor]]
"""`project(x, *weights)`: a layer's cell and its projected inputs."""


def gradients(
    problem: Recurrence, leaves: Sequence[Tensor], states: list[Tensor], grads: Grads
) -> tuple[Tensor | None, ...]:
    """Gradients of u `(T, B, K)`, of the initial state `(B, S)` and of the weights, differentiable.

    `problem` has live tensors; `states` are the solved ones, one `(T + 1, B, part)` for each part. The weights are the
    cell's own; for a user's cell they are the `leaves` that it holds.
    """
    outputs, final = grads
    if outputs is None:
        outputs = torch.zeros_like(problem.u[..., :0])
    if final is None:
        final = torch.zeros_like(problem.initial)
    weights = tuple(leaves) or problem.cell.weights
    whole = torch.cat(states, -1).detach()
    job = _Job(problem.cell.with_weights(()), bool(leaves), problem.lengths, problem.resets)
    found: tuple[Tensor, ...] = _Gradients.apply(job, whole, outputs, final, problem.u, problem.initial, *weights)
    return found


def layer_gradients(
    project: Project, live: Sequence[Tensor | None], states: list[Tensor], grads: Grads,
    lengths: Tensor | None = None, resets: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`gradients` for a whole layer: of x, the initial state and torch's parameters."""
    with torch.enable_grad():
        given = [None if tensor is None else tensor.view_as(tensor) for tensor in live]  # apart from the states' graph
        x, initial, *weights = given
        assert x is not None
        assert initial is not None
        cell, u = project(x, *weights)
        if isinstance(cell, GenericCell):
            raise NotImplementedError(
                f"there are no second-order gradients here for this cell ({cell.told}): use torch.autograd.grad with "
                "create_graph=True outside of torch.func, or solver='sequential'"
            )
        states = [part.to(initial.dtype) for part in states]
        at_u, at_initial, *at_weights = gradients(Recurrence(cell, u, initial, lengths, resets), (), states, grads)
    results = [(u, at_u), (initial, at_initial), *zip(cell.weights, at_weights, strict=True)]
    results = [(result, grad) for result, grad in results if result.requires_grad]
    wanted = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
    found = iter(
        torch.autograd.grad(
            [result for result, _ in results], wanted, [grad for _, grad in results],
            create_graph=torch.is_grad_enabled(), retain_graph=True, allow_unused=True,
        )
    )  # fmt: skip
    return tuple(next(found) if tensor is not None and tensor.requires_grad else None for tensor in given)


def leaves_of(evaluated: Tensor) -> list[Tensor]:
    """Parameters that an evaluation of a user's cell depends on, in a fixed order."""
    found: dict[int, Tensor] = {}
    seen, ahead = set(), [evaluated.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        ahead.extend(following for following, _ in node.next_functions)
    return list(found.values())


@dataclass(frozen=True)
class _Job:
    """The arguments of the gradients that are not tensors: a cell without its weights, or one that holds its own."""

    cell: Any
    holds_weights: bool
    lengths: Tensor | None
    resets: Tensor | None

    def step(self, weights: Sequence[Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        step: Callable[[Tensor, Tensor], Tensor] = (
            self.cell.step if self.holds_weights else self.cell.with_weights(tuple(weights)).step
        )
        return step

    def problem(self, step: Callable[[Tensor, Tensor], Tensor], u: Tensor, initial: Tensor) -> Recurrence:
        """The recurrence of any step over flat states; its gate gradients are the adjoints themselves."""
        return Recurrence(GenericCell(step, initial, u.shape[2:]), u, initial, self.lengths, self.resets)

    def adjoints(
        self, states: Tensor, outputs: Tensor, final: Tensor, u: Tensor, initial: Tensor, weights: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The adjoints of all states, `(T, B, S)`, and of the initial one."""
        problem = self.problem(self.step(weights), u, initial)
        incoming = outputs if outputs.shape[-1] else None
        found, at_initial, _ = solve_adjoint(problem, [states], incoming, final, _plan(problem, "backward"))
        return found, at_initial


class _Gradients(torch.autograd.Function):
    """Gradients of u, the initial state and the weights, as a function of these and of the loss's gradients."""

    @staticmethod
    def forward(
        ctx: Any, job: _Job, states: Tensor, outputs: Tensor, final: Tensor, u: Tensor, initial: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        with without_autocast(u.device):
            adjoints, at_initial = job.adjoints(states, outputs, final, u, initial, weights)
            at_u, *at_weights = _pull(job, _before(job, states, initial), u, weights, adjoints)[1:]
        ctx.job, ctx.width = job, outputs.shape[-1]
        ctx.save_for_backward(states, u, initial, *weights, adjoints)
        return at_u, at_initial, *at_weights

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "timeloom's gradients can be differentiated twice, not three times (create_graph=True): for more use "
                "solver='sequential', without lengths= or resets="
            )
        states, u, initial, *weights, adjoints = ctx.saved_tensors
        with without_autocast(u.device):
            found = _second(ctx.job, states, u, initial, weights, adjoints, directions)
        return None, None, found[0][..., : ctx.width], *found[1:]


def _second(
    job: _Job, states: Tensor, u: Tensor, initial: Tensor, weights: Sequence[Tensor], adjoints: Tensor,
    directions: Sequence[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients with respect to the loss's gradients `(T, B, S)` and `(B, S)`, u, the initial state and the weights."""
    along_u, along_initial, *along_weights = directions
    before = _before(job, states, initial)
    pushed = _push(job, before, u, weights, (torch.zeros_like(before), along_u, *along_weights))
    size = initial.shape[-1]

    def tangent_step(tangent: Tensor, x: Tensor) -> Tensor:
        at, at_u, added = x.split((size, u.shape[-1], size), -1)
        given = (at.unsqueeze(0), at_u.unsqueeze(0))
        along = _push(job, *given, weights, (tangent.unsqueeze(0), None, *(None for _ in weights)))
        return torch.add(along.squeeze(0), added)

    problem = job.problem(tangent_step, torch.cat([before, u, pushed], -1), along_initial)
    moved, _ = solve_states(problem, _plan(problem, "forward"), choose_sweeper(problem))
    tangents = torch.cat(previous_states(problem, moved), -1)
    by_before, by_u, *by_weights = _curve(job, before, u, weights, adjoints, (tangents, along_u, *along_weights))
    starts = _starts(job, by_before)
    into_states = torch.where(starts, 0, by_before)
    into_states = pad(into_states[1:], (0, 0, 0, 0, 0, 1))  # the state before step t is the one after step t − 1
    again, at_initial = job.adjoints(states, into_states, torch.zeros_like(initial), u, initial, weights)
    more_u, *more_weights = _pull(job, before, u, weights, again)[1:]
    at_initial = at_initial + torch.where(starts, by_before, 0).sum(0)
    weight_grads = (one + other for one, other in zip(by_weights, more_weights, strict=True))
    return moved[0][1:], final_state(problem, moved), by_u + more_u, at_initial, *weight_grads


def _starts(job: _Job, like: Tensor) -> Tensor:
    """Mask `(T, B, 1)` of the steps that begin at the initial state."""
    marks = (
        torch.zeros(like.shape[:2], dtype=torch.bool, device=like.device) if job.resets is None else job.resets.clone()
    )
    marks[:1] = True
    return marks.unsqueeze(-1)


def _before(job: _Job, states: Tensor, initial: Tensor) -> Tensor:
    """States before every step, `(T, B, S)`, resets applied."""
    return torch.where(_starts(job, states[:-1]), initial, states[:-1])


def _evaluated(job: _Job, before: Tensor, u: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """All steps at once, `(T, B, S)`, on a new tape, and its leaves: states before the steps, u and the weights."""
    given = [before.detach().requires_grad_(), u.detach().requires_grad_(u.is_floating_point())]
    held = list(weights) if job.holds_weights else [weight.detach().requires_grad_() for weight in weights]
    out = job.step(held)(given[0].flatten(0, 1), given[1].flatten(0, 1)).view_as(before)
    return out, [*given, *held]


def _pull(job: _Job, before: Tensor, u: Tensor, weights: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of `⟨grad, F⟩` with respect to the states before the steps, u and the weights."""
    with torch.enable_grad():
        out, given = _evaluated(job, before, u, weights)
    return _grads(out, given, grad)


def _push(
    job: _Job, before: Tensor, u: Tensor, weights: Sequence[Tensor], directions: Sequence[Tensor | None]
) -> Tensor:
    """The derivative of F in a direction, `(T, B, S)`, as the gradient of a vector-Jacobian product by its vector."""
    with torch.enable_grad():
        out, given = _evaluated(job, before, u, weights)
        probe = torch.zeros_like(out, requires_grad=True)
        pulled = _grads(out, given, probe, create_graph=True)
    pairs = [(p, d) for p, d in zip(pulled, directions, strict=True) if d is not None and p.requires_grad]
    if not pairs:
        return torch.zeros_like(out)
    return _grads([p for p, _ in pairs], [probe], [d for _, d in pairs])[0]


def _curve(
    job: _Job, before: Tensor, u: Tensor, weights: Sequence[Tensor], adjoints: Tensor, directions: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of `⟨adjoints, DF · directions⟩` with respect to the states before the steps, u and the weights."""
    with torch.enable_grad():
        out, given = _evaluated(job, before, u, weights)
        pulled = _grads(out, given, adjoints, create_graph=True)
    pairs = [(p, d) for p, d in zip(pulled, directions, strict=True) if p.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(tensor) for tensor in given)
    return _grads([p for p, _ in pairs], given, [d for _, d in pairs])


def _grads(results: Any, given: Sequence[Tensor], grads: Any, create_graph: bool = False) -> tuple[Tensor, ...]:
    """`torch.autograd.grad`, with zeros for tensors that the results do not depend on."""
    wanted = [tensor for tensor in given if tensor.requires_grad]
    found = iter(
        torch.autograd.grad(results, wanted, grads, retain_graph=True, create_graph=create_graph, allow_unused=True)
    )
    results = (next(found) if tensor.requires_grad else None for tensor in given)
    return tuple(torch.zeros_like(tensor) if one is None else one for tensor, one in zip(given, results, strict=True))


def _plan(problem: Recurrence, direction: Any) -> Plan:
    """Plain sweeps, exact in any case, over chunks of about √(8T) steps."""
    chunk = max(SHORTEST_CHUNK, math.isqrt(8 * problem.steps))
    chunk = problem.steps if 2 * chunk > problem.steps else chunk
    return Plan(
        chunk=chunk,
        warmup=0 if chunk >= problem.steps else WARMUP,
        driver=march,
        correction="none",
        tolerance=default_tolerance(problem, direction),
        max_iters=MOST_SWEEPS,
        on_divergence="sequential",
        reason="second-order gradients",
    )
