"""timeloom: train nonlinear recurrent networks parallel in time."""

from timeloom import distributed, solvers
from timeloom.chain import chain_backward
from timeloom.check import CellReport, check_cell
from timeloom.nn import GRU, LSTM, RNN, parallelize, sequentialize
from timeloom.ode import odeint
from timeloom.report import ConvergenceError, SolveReport
from timeloom.scan import linear_scan
from timeloom.unroll import unroll

__version__ = "0.1.0"

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "CellReport",
    "ConvergenceError",
    "SolveReport",
    "chain_backward",
    "check_cell",
    "distributed",
    "linear_scan",
    "odeint",
    "parallelize",
    "sequentialize",
    "solvers",
    "unroll",
]
