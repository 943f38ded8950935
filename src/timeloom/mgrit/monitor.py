"""How far an inexact gradient is from the exact one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from timeloom.report import GradientCheck


def compare(given: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float | None) -> GradientCheck:
    """Relative error and cosine of a gradient in several pieces, taken as one vector."""
    ours, truth = (torch.cat([piece.flatten().double() for piece in pieces]) for pieces in (given, exact))
    length = truth.norm().clamp(min=torch.finfo(torch.float64).tiny)
    cosine = torch.dot(ours, truth) / (length * ours.norm().clamp(min=torch.finfo(torch.float64).tiny))
    return GradientCheck(float((ours - truth).norm() / length), float(cosine), tolerance)
