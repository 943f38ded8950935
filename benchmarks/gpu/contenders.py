"""Everything that can run a GRU layer besides cuDNN: timeloom's solvers and other libraries, behind one interface."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from torch import Tensor, nn

import timeloom
from benchmarks.cases import Case
from benchmarks.gpu import clock, lists
from benchmarks.gpu.clock import captured, event_seconds, peak_bytes
from benchmarks.gpu.compare import Call, Row, forward_of
from benchmarks.gpu.loop import LoopGRU
from benchmarks.layers import Problem, TrainingStep, build
from benchmarks.measure import Clock, solve_of
from timeloom.report import SolveReport
from timeloom.solvers.base import names as solver_names

AS_CUDNN = 2e-4
"""Tolerance of timeloom's solves if products may be rounded to tf32; DEER in JAX gets the same."""


class Runner(Protocol):
    """A layer with weights and inputs of a case, ready to run."""

    clock: Clock

    def forward(self) -> object:
        """The forward pass alone."""

    def step(self) -> object:
        """Forward and backward."""

    def graph(self) -> Call:
        """The same in a CUDA graph; raises RuntimeError if that is impossible."""

    def results(self) -> dict[str, Tensor] | None:
        """Outputs and gradients by name, as in `TrainingStep`; None for a cell other than torch's."""

    def peak(self) -> int | None:
        """Peak bytes of a step, if they can be measured."""

    def facts(self) -> Row:
        """Fields of a row about the last step and, if there was one, the graph's."""


class TorchRunner:
    """A torch module that returns all states and the last one."""

    clock: Clock = staticmethod(event_seconds)

    def __init__(self, layer: nn.Module, case: Case, same_cell: bool = True) -> None:
        problem = Problem.draw(case, clock.DEVICE)
        self._layer, self._same_cell = layer.to(clock.DEVICE), same_cell
        self.step = TrainingStep(self._layer, problem)
        self.forward = forward_of(self._layer, problem.x)
        self._captured: SolveReport | None = None

    def graph(self) -> Call:
        graph = captured(TrainingStep(self._layer, self.step.problem))
        self._captured = self._layer.reports[0] if isinstance(self._layer, timeloom.GRU) else None
        return graph

    def results(self) -> dict[str, Tensor] | None:
        return self.step.results() if self._same_cell else None

    def peak(self) -> int | None:
        return peak_bytes(self.step)

    def facts(self) -> Row:
        if not isinstance(self._layer, timeloom.GRU):
            return {}
        if self._captured is not None:
            return {"graph_certified": self._captured.certified}
        solve = solve_of(self._layer)
        return asdict(solve) | {"sweeps": [solve.sweeps, solve.backward_sweeps]}


@dataclass(frozen=True)
class Contender:
    """One column of the race: how it is made for a case, and what it needs."""

    name: str
    group: str
    """Contenders of a group share a process."""
    make: Callable[[Case], Runner]
    needs: str = ""
    """A module that must be importable."""
    note: str = ""
    in_a_graph: bool = False
    """Whether it may be captured, which is impossible if it reads numbers on the host."""

    @property
    def absent(self) -> bool:
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None


def _cudnn(case: Case) -> Runner:
    return TorchRunner(build(case, "torch"), case)


def _solver(name: str) -> Callable[[Case], Runner]:
    def make(case: Case) -> Runner:
        layer = build(case, "timeloom")
        assert isinstance(layer, timeloom.GRU)
        layer.solver = name
        return TorchRunner(layer, case)

    return make


def _compiled_loop(case: Case) -> Runner:
    loop = LoopGRU(case.hidden)
    loop.load_state_dict(build(case, "torch").state_dict())
    loop.compile()
    return TorchRunner(loop, case)


def _pararnn(case: Case) -> Runner:
    from pararnn import ParaGRU, ParaRNN

    layer = ParaRNN(ParaGRU(case.hidden, case.hidden), batch_first=False)
    return TorchRunner(_WithLast(layer.train()), case, same_cell=False)


class _WithLast(nn.Module):
    """Returns the last state beside all of them, as torch's layers do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = self.layer(x)
        return states, states[-1:]


def _jax(method: str) -> Callable[[Case], Runner]:
    def make(case: Case) -> Runner:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        from benchmarks.gpu.jax_runner import JaxRunner

        return JaxRunner(case, method, AS_CUDNN)

    return make


TIMELOOM = Contender("timeloom", "torch", _solver("auto"), in_a_graph=True)
CUDNN = Contender("cuDNN", "torch", _cudnn, in_a_graph=True)
LOOP = Contender("torch.compile of a loop", "compile", _compiled_loop, in_a_graph=True)
RIVALS = (
    TIMELOOM,
    CUDNN,
    Contender("DEER in JAX", "jax", _jax("deer"), "jax", "our code of the published equations"),
    Contender("lax.scan in JAX", "jax", _jax("scan"), "jax"),
    Contender("pararnn-torch", "pararnn", _pararnn, "pararnn", "another cell (diagonal recurrent weights)"),
    LOOP,
)
SOLVERS = tuple(
    Contender(name, "solvers", _solver(name), in_a_graph=name in ("auto", "shooting")) for name in solver_names()
)
CONTENDERS = {contender.name: contender for contender in (*RIVALS, *SOLVERS)}


def rival_cases(contender: Contender) -> list[Case]:
    """The cases of a rival: for the loop only those at which it compiles, which the two standards run as well."""
    if contender is LOOP:
        return lists.short_rivals()
    return lists.rivals() + (lists.short_rivals() if contender in (TIMELOOM, CUDNN) else [])
