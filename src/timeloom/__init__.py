"""timeloom: train nonlinear recurrent networks parallel in time."""

from timeloom import cells, distributed, solvers
from timeloom.bppsa import chain_backward
from timeloom.check import CellReport, check_cell
from timeloom.forcing import TeacherForcing
from timeloom.inspection.lyapunov import lyapunov_exponents
from timeloom.inspection.outcome import Inspection
from timeloom.inspection.trials import inspect
from timeloom.nn import GRU, LSTM, RNN, ImplicitGRU, Layer, parallelize, sequentialize
from timeloom.ode import odeint
from timeloom.report import ConvergenceError, GradientCheck, SolveReport
from timeloom.scan import linear_scan
from timeloom.solve.warm_starts import WarmStarts
from timeloom.unroll import unroll
from timeloom.version import VERSION
from timeloom.windows import windowed

__version__ = VERSION

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "CellReport",
    "ConvergenceError",
    "GradientCheck",
    "ImplicitGRU",
    "Inspection",
    "Layer",
    "SolveReport",
    "TeacherForcing",
    "WarmStarts",
    "cells",
    "chain_backward",
    "check_cell",
    "distributed",
    "inspect",
    "linear_scan",
    "lyapunov_exponents",
    "odeint",
    "parallelize",
    "sequentialize",
    "solvers",
    "unroll",
    "windowed",
]
