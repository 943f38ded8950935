"""Cells: the mathematics of one step, its derivatives, and the projection of all inputs by one product."""

from timeloom.cells.base import Cell
from timeloom.cells.generic import GenericCell
from timeloom.cells.gru import GRUCell
from timeloom.cells.implicit_gru import ImplicitGRUCell
from timeloom.cells.lstm import LSTMCell
from timeloom.cells.rnn import RNNCell

__all__ = ["Cell", "GRUCell", "GenericCell", "ImplicitGRUCell", "LSTMCell", "RNNCell"]
