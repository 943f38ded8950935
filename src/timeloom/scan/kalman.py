"""A damped linear recurrence: the mean of a Kalman filter, as a parallel scan.

The recurrence `h[t] = a[t] h[t-1] + b[t]` is read as a model with noise of unit variance, in which every h[t] has been
observed, with variance 1/λ, to be b[t], its value if nothing is carried over:

    h[t] = a[t] h[t-1] + b[t] + q,   q ~ N(0, I)          b[t] = h[t] + v,   v ~ N(0, I/λ)

λ is the damping of Levenberg and Marquardt. With λ = 0 the filter's mean is the recurrence itself, with λ → ∞ it is b,
and in between, contributions carried over many steps are damped most. Step by step:

    p⁻ = a p aᵀ + 1,   k = p⁻ (p⁻ + 1/λ)⁻¹,   h = (1 − k) a h + b,   p = (1 − k) p⁻

Filters compose, so all steps are found by one associative scan over `(a, b, c, η, j)`: given the state h before some
steps, the mean `a h + b` and covariance `c` after them; and the information on h in these steps' observations, `η`
and `j`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.scan.associative import Elements, associative_scan
from timeloom.scan.elements import Structure


def damped_scan(
    a: Tensor, b: Tensor, damping: Tensor, structure: Structure, before: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The filter's means for all steps, with shapes as in `timeloom.scan.elements`, and its last mean and covariance.

    damping: λ of every sequence, `(B,)`.
    before: mean and covariance to continue from, as returned for the steps before; zero by default.
    """
    if structure == "block":  # as dense matrices of 2 × 2, one for each unit
        a, b = a.permute(0, 1, 4, 2, 3), b.transpose(-1, -2)
        means, last = _scan(a, b, damping[:, None].expand(b.shape[1:3]), True, before)
        return means.transpose(-1, -2), last
    return _scan(a, b, damping, structure == "dense", before)


def _scan(
    a: Tensor, b: Tensor, damping: Tensor, dense: bool, before: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    gain = (damping / (1 + damping)).unsqueeze(-1)
    wide = gain.unsqueeze(-1) if dense else gain
    through = a.transpose(-1, -2) if dense else a
    unit = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device) if dense else torch.ones_like(b[0])
    elements: Elements = (
        (1 - wide) * a,
        b,
        ((1 - wide) * unit).expand_as(a),
        torch.zeros_like(b),
        wide * (through @ a if dense else through * a),
    )
    mean, covariance = (torch.zeros_like(b[0]), torch.zeros_like(a[0])) if before is None else before
    nothing = (torch.zeros_like(a[0]), mean, covariance, torch.zeros_like(b[0]), torch.zeros_like(a[0]))
    elements = tuple(torch.cat([first.unsqueeze(0), rest]) for first, rest in zip(nothing, elements, strict=True))
    _, means, covariances, _, _ = associative_scan(_combine_dense if dense else _combine_diagonal, elements)
    return means[1:], (means[-1], covariances[-1])


def _combine_diagonal(earlier: Elements, later: Elements) -> Elements:
    a, b, c, eta, j = earlier
    a_, b_, c_, eta_, j_ = later
    shrink = 1 / (1 + c * j_)
    kept = shrink * a
    return (
        a_ * kept,
        a_ * shrink * (b + c * eta_) + b_,
        a_ * a_ * shrink * c + c_,
        kept * (eta_ - j_ * b) + eta,
        kept * j_ * a + j,
    )


def _combine_dense(earlier: Elements, later: Elements) -> Elements:
    a, b, c, eta, j = earlier
    a_, b_, c_, eta_, j_ = later
    n = a.shape[-1]
    system = c @ j_
    system.diagonal(dim1=-2, dim2=-1).add_(1)
    right = torch.cat([a, c, (b + _times(c, eta_)).unsqueeze(-1)], -1)
    # not finite where the elements are so large that the system rounds to a singular one
    kept, spread, mean = torch.linalg.solve_ex(system, right)[0].split([n, n, 1], -1)
    back = kept.transpose(-1, -2)
    return (
        a_ @ kept,
        (a_ @ mean).squeeze(-1) + b_,
        a_ @ spread @ a_.transpose(-1, -2) + c_,
        _times(back, eta_ - _times(j_, b)) + eta,
        back @ j_ @ a + j,
    )


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
