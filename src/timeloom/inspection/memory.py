"""How long a network remembers: its largest Lyapunov exponent along a sequence, and the memory that follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from timeloom.kernels import AdjointData
from timeloom.kernels import sweeper as choose_sweeper
from timeloom.nn.base import Recurrent
from timeloom.nn.sequence import unpack
from timeloom.problem import Recurrence, Segments, cut, empty_states
from timeloom.solve.trunk import LayerSolve

BLOCK = 8
"""Steps after which a tangent is rescaled to length 1: so few that even a network that forgets at once leaves some."""
LONGEST = 4096
"""Most steps that are measured."""
TOLERANCE = 1e-6
"""Differences below this count as zero, by default."""
SETTLING = 0.1
"""Fraction of the steps after which a tangent points in the direction in which differences last longest."""


@dataclass(frozen=True)
class Memory:
    """How fast differences between states fade along a sequence."""

    exponent: float
    """The largest Lyapunov exponent, in units of 1 / step: a difference changes by its exponential at every step."""
    tolerance: float
    """Size to which a difference must have shrunk to be forgotten."""
    looked_at: int
    """Steps along which it was measured."""

    @property
    def steps(self) -> int | None:
        """Steps after which a difference of any size has shrunk to the tolerance; None where it does not shrink."""
        return math.ceil(math.log(self.tolerance) / self.exponent) if self.exponent < 0 else None

    @property
    def words(self) -> str:
        """The same in words, to follow a layer's name."""
        exponent = f"largest Lyapunov exponent {self.exponent:+.3g} a step"
        if self.steps is None:
            return f"does not forget: {exponent}, so differences grow, and no two starts ever lead to the same states"
        half = math.log(0.5) / self.exponent
        return (
            f"forgets: {exponent}, half of a difference is gone after {half:,.3g} steps; after about {self.steps:,} "
            f"steps a state no longer depends on where it started, to within {self.tolerance:.0e}"
        )


def memory_of(problem: Recurrence, tolerance: float) -> Memory:
    """The memory of a recurrence along its own states, averaged over its sequences.

    Gradients shrink along a sequence at the same rate as differences, so an adjoint sweep measures it: by whatever
    kernels run the network, at the cost of a backward pass in one chunk.
    """
    with torch.no_grad():
        if problem.steps > LONGEST:
            problem = replace(problem, u=problem.u[:LONGEST].contiguous())
        sweeper, states = choose_sweeper(problem), empty_states(problem.steps, problem.initial, problem.cell.parts)
        sweeper.forward(cut(problem, problem.steps), problem.initial, states)
        generator = torch.Generator().manual_seed(0)  # any direction except that of a single unit
        tangent = torch.randn(problem.initial.shape, generator=generator).to(problem.initial)
        tangent /= tangent.abs().amax(-1, keepdim=True)
        growth, counted = torch.zeros(problem.batch, dtype=torch.float64), 0
        for end in range(problem.steps, 0, -BLOCK):
            begin = max(0, end - BLOCK)
            tangent, _ = sweeper.adjoint(_all(problem, begin, end), tangent, AdjointData(states, None))
            size = tangent.abs().amax(-1, keepdim=True)  # squares of what is left might underflow
            tangent = tangent / size.clamp(min=torch.finfo(size.dtype).tiny)
            if problem.steps - end >= SETTLING * problem.steps or begin == 0 == counted:
                growth += size.squeeze(-1).double().clamp(min=1e-300).log().cpu()
                counted += end - begin
    return Memory(float(growth.mean()) / counted, tolerance, problem.steps)


def _all(problem: Recurrence, begin: int, end: int) -> Segments:
    """These steps of all sequences."""
    full = torch.full((problem.batch,), begin, dtype=torch.int64)
    return Segments(torch.arange(problem.batch), full, full + (end - begin))


def recurrences(module: Recurrent, x: Tensor) -> Iterator[Recurrence]:
    """The recurrence of every layer and direction of a module on x `(T, B, D)`, from a state of zeros."""
    found: list[Recurrence] = []
    weights = [module._weights_of(index) for index in range(module._stacked)]
    hidden = module._hidden_in(None, True, x.shape[1], x, None)

    def solve_one(index: int, y: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        backwards = module.bidirectional and index % 2 == 1
        given = module._inputs(y, initial, weights[index], None, None, backwards)
        solve: LayerSolve = module._solve_of(index, {})
        problem = solve._problem(given).detach()
        found.append(problem)
        states = empty_states(problem.steps, problem.initial, problem.cell.parts)
        final, _ = choose_sweeper(problem).forward(cut(problem, problem.steps), problem.initial, states)
        return states[0][1:].flip(0) if backwards else states[0][1:], final

    with torch.no_grad():
        module._run_layers(x.to(weights[0][0].dtype), hidden, solve_one)
    return iter(found)


def memories(modules: Sequence[Recurrent], run: Callable[[], object], tolerances: Sequence[float]) -> list[Memory]:
    """The memory of every layer and direction, along the first sequence that each module gets when `run` is called.

    tolerances: one for each; 0, where nothing was solved, stands for float32's.
    """
    given = dict[Recurrent, Tensor]()

    def look(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert isinstance(module, Recurrent)
        given[module] = _first_sequence(module, args[0] if args else named["input"], named.get("lengths"))

    hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    found = (problem for module in modules for problem in recurrences(module, given[module][:LONGEST]))
    return [memory_of(problem, tolerance or TOLERANCE) for problem, tolerance in zip(found, tolerances, strict=True)]


def _first_sequence(module: Recurrent, x: Tensor | PackedSequence, lengths: Tensor | None) -> Tensor:
    """The first sequence of a module's input, `(T, 1, D)`."""
    if isinstance(x, PackedSequence):
        padded, lengths = unpack(x)
        return padded[: int(lengths[0]), :1]
    if x.dim() == 2:
        return x.unsqueeze(1)
    first = x[:1].transpose(0, 1) if module.batch_first else x[:, :1]
    return first if lengths is None else first[: max(1, int(lengths[0]))]
