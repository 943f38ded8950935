"""DEER for a GRU in JAX: Newton's method on all states at once, by the published equations.

For h[t] = f(h[t-1], u[t]) and a guess h of all states, an iteration solves the linear recurrence

    h⁺[t] = J[t] h⁺[t-1] + f(h[t-1], u[t]) − J[t] h[t-1],   J[t] = ∂f/∂h at (h[t-1], u[t]),

by an associative scan over pairs (A, b), until no state moves by more than the tolerance, or by little more and by more
than half as far as before: in tf32 the last digits never settle. Gradients are those of the solution:
λ[t] = J[t+1]ᵀ λ[t+1] + g[t], by the same scan in reverse.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Weights = dict[str, Any]
"""w_ih `(3n, n)`, w_hh `(3n, n)`, b_ih, b_hh `(3n,)`."""
MOST_ITERATIONS = 100
LITTLE = 100.0
"""Multiple of the tolerance below which a movement that does not shrink counts as rounding."""


def cell(weights: Weights, h: Any, u: Any) -> Any:
    """One step of torch's GRU from projected inputs `(3n,)`."""
    m = weights["w_hh"] @ h + weights["b_hh"]
    n = h.shape[0]
    r, z = jax.nn.sigmoid(u[:n] + m[:n]), jax.nn.sigmoid(u[n : 2 * n] + m[n : 2 * n])
    candidate = jnp.tanh(u[2 * n :] + r * m[2 * n :])
    return (1 - z) * candidate + z * h


def project(weights: Weights, x: Any) -> Any:
    """All inputs `(T, B, n)` by one product."""
    return x @ weights["w_ih"].T + weights["b_ih"]


_steps = jax.vmap(jax.vmap(cell, (None, 0, 0)), (None, 0, 0))
_jacobians = jax.vmap(jax.vmap(jax.jacfwd(cell, 1), (None, 0, 0)), (None, 0, 0))


def _combine(first: Any, second: Any) -> Any:
    """(A₂, b₂) after (A₁, b₁); entries `(T, B, n, n)` and `(T, B, n)`."""
    (a1, b1), (a2, b2) = first, second
    return a2 @ a1, jnp.einsum("...ij,...j->...i", a2, b1) + b2


def _before(h: Any) -> Any:
    """The states before all steps, from those after them; the first one is zero."""
    return jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]])


def _newton(weights: Weights, u: Any, tolerance: float) -> tuple[Any, Any]:
    """All states `(T, B, n)` and the iterations they took."""

    def unfinished(carry: Any) -> Any:
        _, moved, moved_before, count = carry
        rounding = (moved < LITTLE * tolerance) & (moved > moved_before / 2)
        return (moved > tolerance) & ~rounding & (count < MOST_ITERATIONS)

    def iterate(carry: Any) -> Any:
        h, moved, _, count = carry
        before = _before(h)
        jacobian = _jacobians(weights, before, u)
        offset = _steps(weights, before, u) - jnp.einsum("...ij,...j->...i", jacobian, before)
        _, following = jax.lax.associative_scan(_combine, (jacobian, offset))
        return following, jnp.max(jnp.abs(following - h)), moved, count + 1

    guess = jnp.zeros((*u.shape[:2], u.shape[2] // 3), u.dtype)
    far = jnp.asarray(jnp.inf, u.dtype)
    h, _, _, count = jax.lax.while_loop(unfinished, iterate, (guess, far, far, 0))
    return h, count


def _solve(tolerance: float, weights: Weights, u: Any) -> tuple[Any, Any]:
    return _newton(weights, u, tolerance)


def _solve_forward(tolerance: float, weights: Weights, u: Any) -> Any:
    h, count = _newton(weights, u, tolerance)
    return (h, count), (weights, u, h)


def _solve_backward(tolerance: float, kept: Any, incoming: Any) -> Any:
    weights, u, h = kept
    before = _before(h)
    jacobian = jnp.swapaxes(_jacobians(weights, before, u), -1, -2)
    following = jnp.concatenate([jacobian[1:], jnp.zeros_like(jacobian[:1])])
    _, adjoint = jax.lax.associative_scan(_combine, (following, incoming[0]), reverse=True)
    _, pull = jax.vjp(lambda weights, u: _steps(weights, before, u), weights, u)
    return pull(adjoint)


deer = jax.custom_vjp(_solve, nondiff_argnums=(0,))
deer.defvjp(_solve_forward, _solve_backward)


def scan(weights: Weights, u: Any) -> Any:
    """All states, one step after the other: JAX's own loop."""

    def step(h: Any, u: Any) -> Any:
        h = jax.vmap(cell, (None, 0, 0))(weights, h, u)
        return h, h

    return jax.lax.scan(step, jnp.zeros((u.shape[1], u.shape[2] // 3), u.dtype), u)[1]
