"""The same layer in torch and in timeloom, and one training step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

import timeloom
from benchmarks.cases import Case, Regime
from benchmarks.trained import trained_state

SEED = 20260

Library = Literal["torch", "timeloom"]
LIBRARIES: tuple[Library, Library] = ("torch", "timeloom")

MODULES: dict[tuple[str, str], Callable[[int, int], nn.Module]] = {
    ("torch", "GRU"): nn.GRU,
    ("torch", "LSTM"): nn.LSTM,
    ("torch", "RNN"): nn.RNN,
    ("timeloom", "GRU"): timeloom.GRU,
    ("timeloom", "LSTM"): timeloom.LSTM,
    ("timeloom", "RNN"): timeloom.RNN,
}


def build(case: Case, library: Library) -> nn.Module:
    """The case's layer, with weights that depend only on the case, not on the library."""
    torch.manual_seed(SEED)
    weights = MODULES["torch", case.cell](case.hidden, case.hidden)
    if case.regime.trained:
        weights.load_state_dict(trained_state(case.cell, case.hidden))
    _enter(case.regime, weights, case.hidden)
    layer = MODULES[library, case.cell](case.hidden, case.hidden)
    layer.load_state_dict(weights.state_dict())
    return layer


def _enter(regime: Regime, layer: nn.Module, hidden: int) -> None:
    parameters = dict(layer.named_parameters())
    with torch.no_grad():
        parameters["weight_hh_l0"].mul_(regime.recurrent_scale)
        # Rows n..2n belong to the gate that keeps the state in both: GRU (r, z, n), LSTM (i, f, g, o).
        parameters["bias_hh_l0"][hidden : 2 * hidden].add_(regime.gate_bias)


@dataclass(frozen=True)
class Problem:
    """Inputs of a case, and the random weights of all outputs in its loss."""

    x: Tensor
    """(T, B, n)."""
    weight_states: Tensor
    """(T, B, n): weights of all states."""
    weight_last: tuple[Tensor, ...]
    """(1, B, n) each: weights of the last state's parts."""

    @classmethod
    def draw(cls, case: Case, device: str = "cpu") -> Problem:
        generator = torch.Generator(device).manual_seed(SEED + 1)
        whole, last = (case.length, case.batch, case.hidden), (1, case.batch, case.hidden)
        parts = 2 if case.cell == "LSTM" else 1
        return cls(
            torch.randn(whole, generator=generator, device=device),
            torch.randn(whole, generator=generator, device=device),
            tuple(torch.randn(last, generator=generator, device=device) for _ in range(parts)),
        )

    def to(self, dtype: torch.dtype) -> Problem:
        return Problem(
            self.x.to(dtype), self.weight_states.to(dtype), tuple(part.to(dtype) for part in self.weight_last)
        )


class TrainingStep:
    """Forward and backward of one layer on one problem; the gradients of an earlier call are dropped first."""

    def __init__(self, layer: nn.Module, problem: Problem) -> None:
        self.layer = layer
        self.problem = problem
        self.x = problem.x.clone().requires_grad_()

    def __call__(self) -> tuple[Tensor, ...]:
        """Runs the step; returns the outputs."""
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        states, last = self.layer(self.x)
        parts: tuple[Tensor, ...] = last if isinstance(last, tuple) else (last,)
        loss = (states * self.problem.weight_states).sum()
        for part, weight in zip(parts, self.problem.weight_last, strict=True):
            loss = loss + (part * weight).sum()
        loss.backward()
        return (states, *parts)

    def results(self) -> dict[str, Tensor]:
        """Runs the step; returns every output and gradient under its name."""
        named = dict(zip(("output", "h_n", "c_n"), (part.detach() for part in self()), strict=False))
        assert self.x.grad is not None
        named["x.grad"] = self.x.grad
        for name, parameter in self.layer.named_parameters():
            assert parameter.grad is not None
            named[f"{name}.grad"] = parameter.grad
        return named
