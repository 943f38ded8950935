"""timeloom: train nonlinear recurrent networks parallel in time."""

from timeloom import solvers
from timeloom.check import CellReport, check_cell
from timeloom.nn import GRU, LSTM, RNN, parallelize, sequentialize
from timeloom.report import ConvergenceError, SolveReport
from timeloom.scan import linear_scan
from timeloom.unroll import unroll
from timeloom.warm import WarmStarts

__version__ = "0.1.0"

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "CellReport",
    "ConvergenceError",
    "SolveReport",
    "WarmStarts",
    "check_cell",
    "linear_scan",
    "parallelize",
    "sequentialize",
    "solvers",
    "unroll",
]
