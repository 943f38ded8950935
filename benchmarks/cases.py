"""What is measured: named lists of cases, each with its sizes, its regime of weights and its goal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

NEVER_SLOWER = 0.95
"""Goal where none was set: timeloom may be a few percent slower, no more."""
SLOWEST_TORCH_STEP = 15.0
"""Seconds of a torch step beyond which a case is left out of the grid."""
LARGEST_STATES = 2**28
"""Bytes of one float32 trajectory (T, B, n) beyond which a case is left out: torch keeps a dozen of them."""


CellName = Literal["GRU", "LSTM", "RNN"]
GATES: dict[CellName, int] = {"GRU": 3, "LSTM": 4, "RNN": 1}


@dataclass(frozen=True)
class Regime:
    """How the default initial weights are changed."""

    name: str
    recurrent_scale: float = 1.0
    """Factor on the recurrent weights: large ones make a network that does not contract."""
    gate_bias: float = 0.0
    """Added to the bias of the gate that keeps the state (GRU: update, LSTM: forget): large ones make long memory."""
    trained: bool = False
    """Whether a short training comes first (`benchmarks.trained`)."""


DEFAULT = Regime("default")
LONG_MEMORY = (Regime("bias+4", gate_bias=4.0), Regime("bias+6", gate_bias=6.0))
STRONG = tuple(Regime(f"weights×{factor}", recurrent_scale=float(factor)) for factor in (2, 4, 8))
TRAINED = Regime("trained", trained=True)


@dataclass(frozen=True)
class Case:
    """One comparison: forward + backward of a single layer on (T, B, n) inputs."""

    length: int
    batch: int
    hidden: int
    cell: CellName = "GRU"
    regime: Regime = DEFAULT
    goal: float = NEVER_SLOWER

    @property
    def name(self) -> str:
        return f"{self.cell} T={self.length} B={self.batch} n={self.hidden} {self.regime.name}"


def torch_step_seconds(case: Case) -> float:
    """Rough time of forward + backward in torch.nn on two cores, to leave out cases that take too long.

    A time step costs a constant for its dozens of small calls (the LSTM's fused primitive has few), the
    matrix products of both passes, and passes over the gates in memory.
    """
    overhead = 230e-6 if case.cell == "GRU" else 3.5e-6
    gates = GATES[case.cell]
    products = 12 * gates * case.batch * case.hidden**2 / 60e9
    elementwise = 50e-9 * gates * case.batch * case.hidden / 8
    return case.length * (overhead + products + elementwise)


def _affordable(case: Case) -> bool:
    states = 4 * case.length * case.batch * case.hidden
    return torch_step_seconds(case) <= SLOWEST_TORCH_STEP and states <= LARGEST_STATES


def headline() -> list[Case]:
    """The cases with a promised speedup."""
    return [
        Case(16384, 1, 32, goal=50.0),
        Case(16384, 16, 32, goal=10.0),
        Case(16384, 1, 128, goal=25.0),
        Case(1024, 1, 64, goal=5.0),
        *(Case(16384, 1, 32, regime=regime, goal=5.0) for regime in LONG_MEMORY),
        Case(16384, 1, 32, cell="LSTM", goal=5.0),
    ]


GRID_LENGTHS = (16, 64, 256, 1024, 4096, 16384)
GRID_BATCHES = (1, 4, 16, 64, 256)
GRID_HIDDENS = (8, 32, 128, 512)


def _grid(cell: CellName) -> list[Case]:
    """Every second point of the grid in each direction, like the black squares of a chessboard."""
    axes = (enumerate(GRID_HIDDENS), enumerate(GRID_BATCHES), enumerate(GRID_LENGTHS))
    cases = (
        Case(length, batch, hidden, cell=cell)
        for (i, hidden), (j, batch), (k, length) in product(*axes)
        if (i + j + k) % 2 == 0
    )
    return [case for case in cases if _affordable(case)]


def grid() -> list[Case]:
    """GRUs of all sizes, the losing points too."""
    return _grid("GRU")


def lstm_grid() -> list[Case]:
    """LSTMs of all sizes, against torch's fused primitive."""
    return _grid("LSTM")


def regimes() -> list[Case]:
    """Weights that contract, remember long, or do neither."""
    sizes: Iterable[tuple[CellName, int]] = (("GRU", 8), ("GRU", 32), ("GRU", 128), ("LSTM", 32))
    return [
        Case(4096, 1, hidden, cell=cell, regime=regime)
        for cell, hidden in sizes
        for regime in (DEFAULT, *STRONG, *LONG_MEMORY)
    ]


CASE_LISTS: dict[str, Callable[[], list[Case]]] = {
    "headline": headline,
    "grid": grid,
    "lstm-grid": lstm_grid,
    "regimes": regimes,
}
