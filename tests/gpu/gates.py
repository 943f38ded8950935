"""The elementary functions of gates, measured through layers.

Gradients contain 1 − gate and 1 − tanh², where each rounding counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import timeloom as tl
from tests.gpu.checks import Check

REACH, COUNT = 9.0, 40_001
"""Largest magnitude of the arguments, and their number."""
ROUNDING = 2.0**-24
"""A rounding of a number just below one."""


def gates() -> list[Check]:
    return [Check("tanh is torch's", _tanh), Check("sigmoid is torch's", _sigmoid)]


def _tanh(device: str) -> str:
    """The outputs of an Elman network without memory."""
    x = torch.linspace(-REACH, REACH, COUNT, device=device).view(-1, 1, 1)
    layer = tl.RNN(1, 1, bias=False, solver=tl.solvers.Shooting(chunk=1000)).to(device)
    with torch.no_grad():
        layer.weight_ih_l0.fill_(1.0)
        layer.weight_hh_l0.zero_()
        y, opposite = layer(x)[0], layer(-x)[0]
    if not torch.equal(opposite, -y):
        raise AssertionError(f"tanh is not odd: apart by {float((opposite + y).abs().max()):.1e}")
    return _as_exact(x.flatten(), y.flatten(), torch.tanh)


def _sigmoid(device: str) -> str:
    """The states c of an LSTM that start at 1 and are multiplied by a forget gate of `x`, then by an open one."""
    x = torch.linspace(-REACH, REACH, COUNT, device=device)
    layer = tl.LSTM(1, 1, bias=False, solver=tl.solvers.Shooting(chunk=2)).to(device)
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.tensor([[0.0], [1.0], [0.0], [0.0]]))
        layer.weight_hh_l0.zero_()
        first = torch.zeros(1, COUNT, 1, device=device)
        steps = torch.stack([x, torch.full_like(x, 100.0)]).unsqueeze(-1)
        c = layer(steps, (first, first + 1))[1][1].flatten()
    return _as_exact(x, c, torch.sigmoid)


def _as_exact(x: Tensor, y: Tensor, function: Callable[[Tensor], Tensor]) -> str:
    """Compare values near one in units of rounding; their mean shows what a single rounding cannot."""
    exact = function(x.double())
    near = exact.abs() > 0.5
    own, theirs = ((value.double() - exact)[near].abs() / ROUNDING for value in (y, function(x)))
    square, torchs = float(own.square().mean()), float(theirs.square().mean())
    said = f"{square**0.5:.2f} roundings, {own.max():.2f} at most; torch {torchs**0.5:.2f}, {theirs.max():.2f}"
    if not (square < 2 * torchs and own.max() < 3):
        raise AssertionError(said)
    return said
