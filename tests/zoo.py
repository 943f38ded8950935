"""A small zoo of networks and regimes that the tests cross with solvers.

Each network holds the recurrence that timeloom solves and, independent of it, one step in torch operations: the truth
is a plain loop over that step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from timeloom.auto.layer_experience import LayerExperience
from timeloom.cells import GenericCell, GRUCell, ImplicitGRUCell, LSTMCell, RNNCell
from timeloom.problem import Recurrence, joined
from timeloom.report import SolveReport
from timeloom.solve.recurrence import run
from timeloom.solvers import Solver

INPUTS = 3
"""Width of x in every network."""

REGIMES: dict[str, tuple[float, float]] = {
    "default": (0.0, 1.0),
    "gate+4": (4.0, 1.0),
    "gate+6": (6.0, 1.0),
    "weights×2": (0.0, 2.0),
    "weights×4": (0.0, 4.0),
    "weights×8": (0.0, 8.0),
}
"""An addend for the bias of the gate that keeps the state, and a factor for the recurrent weights."""


@dataclass(frozen=True)
class Network:
    """A network with its parameters as leaves of autograd's graph."""

    parts: tuple[int, ...]
    parameters: dict[str, Tensor]
    recurrence: Callable[[Tensor, Tensor], Recurrence]
    """`recurrence(x, initial)`: from x `(T, B, D)` and initial `(B, S)` to the problem that timeloom solves."""
    step: Callable[[Tensor, Tensor], Tensor]
    """`step(state, x)`: the truth, `(N, S)` and `(N, D)` to `(N, S)`."""

    @property
    def size(self) -> int:
        return sum(self.parts)


Build = Callable[[int, float, float], Network]


def _leaves(module: nn.Module, bias: float, scale: float, gate: slice | None) -> dict[str, Tensor]:
    """A torch layer's parameters, put into a regime."""
    parameters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    parameters["weight_hh_l0"] *= scale
    if gate is not None:
        parameters["bias_ih_l0"][gate] += bias
    return {name: parameter.requires_grad_() for name, parameter in parameters.items()}


def gru(n: int, bias: float, scale: float) -> Network:
    parameters = _leaves(nn.GRU(INPUTS, n), bias, scale, slice(n, 2 * n))
    weights = tuple(parameters.values())

    def recurrence(x: Tensor, initial: Tensor) -> Recurrence:
        cell, u = GRUCell.project(x, *weights)
        return Recurrence(cell, u, initial)

    return Network((n,), parameters, recurrence, lambda state, x: torch.gru_cell(x, state, *weights))


def implicit_gru(n: int, bias: float, scale: float) -> Network:
    """The multigrid paper's GRU."""
    parameters = _leaves(nn.GRU(INPUTS, n), bias, scale, slice(n, 2 * n))
    w_ih, w_hh, b_ih, b_hh = parameters.values()

    def recurrence(x: Tensor, initial: Tensor) -> Recurrence:
        cell, u = ImplicitGRUCell.project(x, w_ih, w_hh, b_ih, b_hh)
        return Recurrence(cell, u, initial)

    def step(state: Tensor, x: Tensor) -> Tensor:
        i_r, i_z, i_n = F.linear(x, w_ih, b_ih).chunk(3, -1)
        h_r, h_z, h_n = F.linear(state, w_hh, b_hh).chunk(3, -1)
        rate = 1 - torch.sigmoid(i_z + h_z)
        return (state + rate * torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n)) / (1 + rate)

    return Network((n,), parameters, recurrence, step)


def rnn(n: int, bias: float, scale: float, nonlinearity: str) -> Network:
    parameters = _leaves(nn.RNN(INPUTS, n), bias, scale, None)
    weights = tuple(parameters.values())
    one_step = torch.rnn_tanh_cell if nonlinearity == "tanh" else torch.rnn_relu_cell

    def recurrence(x: Tensor, initial: Tensor) -> Recurrence:
        cell, u = RNNCell.project(x, *weights, nonlinearity=nonlinearity)
        return Recurrence(cell, u, initial)

    return Network((n,), parameters, recurrence, lambda state, x: one_step(x, state, *weights))


def lstm(n: int, bias: float, scale: float) -> Network:
    parameters = _leaves(nn.LSTM(INPUTS, n), bias, scale, slice(n, 2 * n))
    weights = tuple(parameters.values())

    def recurrence(x: Tensor, initial: Tensor) -> Recurrence:
        cell, u = LSTMCell.project(x, *weights)
        return Recurrence(cell, u, initial)

    def step(state: Tensor, x: Tensor) -> Tensor:
        return torch.cat(torch.lstm_cell(x, tuple(state.chunk(2, -1)), *weights), -1)

    return Network((n, n), parameters, recurrence, step)


def lstm_projected(n: int, bias: float, scale: float) -> Network:
    n, outputs = max(n, 2), max(1, n - 2)
    parameters = _leaves(nn.LSTM(INPUTS, n, proj_size=outputs), bias, scale, slice(n, 2 * n))
    w_ih, w_hh, b_ih, b_hh, w_hr = parameters.values()

    def recurrence(x: Tensor, initial: Tensor) -> Recurrence:
        cell, u = LSTMCell.project(x, w_ih, w_hh, b_ih, b_hh, w_hr)
        return Recurrence(cell, u, initial)

    def step(state: Tensor, x: Tensor) -> Tensor:
        h, c = state.split([outputs, n], -1)
        i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return torch.cat([F.linear(o.sigmoid() * c.tanh(), w_hr), c], -1)

    return Network((outputs, n), parameters, recurrence, step)


def _generic(function: Callable[..., object], like: object, parameters: dict[str, Tensor]) -> Network:
    """A network over a user's function; `like` is a state of one row, which defines the shapes."""
    shape = GenericCell(function, like, (INPUTS,))

    def recurrence(x: Tensor, initial: Tensor) -> Recurrence:
        return Recurrence(GenericCell(function, shape.unpack(initial), (INPUTS,)), x, initial)

    def step(state: Tensor, x: Tensor) -> Tensor:
        return shape.pack(function(shape.unpack(state), x))

    return Network(shape.parts, parameters, recurrence, step)


def _uniform(*shape: int) -> Tensor:
    return (2 * torch.rand(shape) - 1) / shape[-1] ** 0.5


def function(n: int, bias: float, scale: float) -> Network:
    """A leaky Elman network as a closure: a dense Jacobian, a Tensor as state."""
    w, v, b = _uniform(n, n) * scale, _uniform(n, INPUTS), _uniform(n)
    leaves = {"w": w.requires_grad_(), "v": v.requires_grad_(), "b": b.requires_grad_()}
    keep = torch.tensor(bias + 0.5).sigmoid()

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return keep * h + (1 - keep) * torch.tanh(h @ w.t() + x @ v.t() + b)

    return _generic(cell, torch.zeros(1, n), leaves)


def function_of_tuple(n: int, bias: float, scale: float) -> Network:
    """A state of two parts of different shapes, each depending on the other."""
    w, v, m = _uniform(n, n) * scale, _uniform(n, INPUTS), _uniform(n, 4) * scale
    leaves = {"w": w.requires_grad_(), "v": v.requires_grad_(), "m": m.requires_grad_()}
    keep = torch.tensor(bias + 0.5).sigmoid()

    def cell(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h, memory = state
        h = torch.tanh(h @ w.t() + x @ v.t() + memory.flatten(1) @ m.t())
        return h, keep * memory + (1 - keep) * (h @ m).unflatten(-1, (2, 2))

    return _generic(cell, (torch.zeros(1, n), torch.zeros(1, 2, 2)), leaves)


def elementwise(n: int, bias: float, scale: float) -> Network:
    """A gated cell in which no unit depends on another: a diagonal Jacobian."""
    w, v, z = _uniform(n) * scale, _uniform(n, INPUTS), _uniform(n, INPUTS)
    leaves = {"w": w.requires_grad_(), "v": v.requires_grad_(), "z": z.requires_grad_()}

    def cell(h: Tensor, x: Tensor) -> Tensor:
        keep = torch.sigmoid(x @ z.t() + bias + 0.3 * h)
        return keep * h + (1 - keep) * torch.tanh(w * h + x @ v.t())

    return _generic(cell, torch.zeros(1, n), leaves)


class ModuleCell(nn.Module):
    """torch.nn.GRUCell with timeloom's order of arguments."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inner = nn.GRUCell(INPUTS, n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.inner(x, h)


def module(n: int, bias: float, scale: float) -> Network:
    cell = ModuleCell(n)
    with torch.no_grad():
        cell.inner.weight_hh *= scale
        cell.inner.bias_ih[n : 2 * n] += bias
    return _generic(cell, torch.zeros(1, n), dict(cell.named_parameters()))


ZOO: dict[str, Build] = {
    "gru": gru,
    "implicit gru": implicit_gru,
    "lstm": lstm,
    "lstm projected": lstm_projected,
    "rnn tanh": lambda *regime: rnn(*regime, nonlinearity="tanh"),
    "rnn relu": lambda *regime: rnn(*regime, nonlinearity="relu"),
    "function": function,
    "function of tuple": function_of_tuple,
    "elementwise": elementwise,
    "module": module,
}
HAND_WRITTEN = ("gru", "implicit gru", "lstm", "lstm projected", "rnn tanh", "rnn relu")
KERNELS = ("gru", "lstm", "rnn tanh", "rnn relu")
"""Networks that the C kernels run."""
UNGATED = ("rnn tanh", "rnn relu")


def cases(names: tuple[str, ...] = tuple(ZOO)) -> list[tuple[str, str]]:
    """Every network with every regime that applies to it."""
    return [(name, regime) for name in names for regime in REGIMES if not (name in UNGATED and "gate" in regime)]


def network(
    name: str, regime: str = "default", n: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return ZOO[name](n, *REGIMES[regime])
        finally:
            torch.set_default_dtype(before)


def data(
    net: Network, steps: int, batch: int, seed: int = 1, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Inputs `(T, B, D)` and an initial state `(B, S)`, both asking for gradients."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, batch, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
    initial = 0.5 * torch.randn(batch, net.size, generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), initial.requires_grad_()


@dataclass
class Solution:
    """Outputs `(T, B, ·)`, the final state `(B, S)` and the reports, in the order in which they were made."""

    outputs: Tensor
    final: Tensor
    reports: list[SolveReport]

    @property
    def report(self) -> SolveReport:
        return self.reports[-1]


def marks(steps: int) -> tuple[Tensor, Tensor]:
    """Lengths of five sequences (no step, one, some and all), and resets `(T, 5)`; for at least 15 steps.

    There are resets at the first step, of several sequences at once, at consecutive steps, at an end, and past one.
    """
    lengths, resets = torch.tensor([0, 1, 9, steps, 12]), torch.zeros(steps, 5, dtype=torch.bool)
    resets[0, 3] = resets[6, 2] = resets[6, 3] = resets[7, 3] = resets[11, 4] = True
    resets[14, 1] = True  # past its end
    return lengths, resets


def solve(
    net: Network,
    x: Tensor,
    initial: Tensor,
    solver: Solver,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    experience: LayerExperience | None = None,
) -> Solution:
    """The network run by timeloom."""
    problem = net.recurrence(x, initial)
    problem = Recurrence(problem.cell, problem.u, problem.initial, lengths, resets)
    reports: list[SolveReport] = []
    outputs, final = run(problem, solver, experience or LayerExperience(), reports.append)
    return Solution(joined(outputs), final, reports)


def truth(
    net: Network, x: Tensor, initial: Tensor, lengths: Tensor | None = None, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The network run one step after the other: states `(T, B, S)`, zero past a sequence's end, and the final state."""
    state, states = initial, []
    for t in range(len(x)):
        before = state if resets is None else torch.where(resets[t].unsqueeze(-1), initial, state)
        following = net.step(before, x[t])
        state = following if lengths is None else torch.where((t < lengths).unsqueeze(-1), following, state)
        states.append(state if lengths is None else torch.where((t < lengths).unsqueeze(-1), state, 0))
    return torch.stack(states), state


def gradients(
    net: Network, x: Tensor, initial: Tensor, outputs: Tensor, final: Tensor, loss: str = "both", more: bool = False
) -> dict[str, Tensor]:
    """Gradients of a loss on all `outputs`, on the `last` state or on `both`; `more`: the graph is kept for reuse."""
    generator = torch.Generator().manual_seed(2)
    weights = [
        torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.dtype) for part in (outputs, final)
    ]
    on_outputs, on_final = (outputs * weights[0]).sum(), (final * weights[1]).sum()
    value = {"outputs": on_outputs, "last": on_final, "both": on_outputs + on_final}[loss]
    named = {"x": x, "initial": initial, **net.parameters}
    grads = torch.autograd.grad(value, list(named.values()), allow_unused=True, retain_graph=more)
    return {
        name: torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(named.items(), grads, strict=True)
    }


def difference(given: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value expected."""
    if expected.numel() == 0:
        return 0.0
    given, expected = given.detach(), expected.detach()
    return float((given - expected).abs().max()) / max(float(expected.abs().max()), 1e-300)


def check_against_truth(
    net: Network,
    x: Tensor,
    initial: Tensor,
    solver: Solver,
    close: float,
    loss: str = "both",
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
) -> Solution:
    """Solve, and compare outputs and all gradients with the plain loop."""
    solution = solve(net, x, initial, solver, lengths, resets)
    states, final = truth(net, x, initial, lengths, resets)
    outputs = states[..., : solution.outputs.shape[-1]]
    assert difference(solution.outputs, outputs) < close
    assert difference(solution.final, final) < close
    given = gradients(net, x, initial, solution.outputs, solution.final, loss)
    expected = gradients(net, x, initial, outputs, final, loss)
    for name in expected:
        assert difference(given[name], expected[name]) < 10 * close, name
    return solution
