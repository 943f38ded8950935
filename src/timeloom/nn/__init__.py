"""Drop-in modules and the swap of a whole model's recurrent layers."""

from timeloom.nn.layer import Layer
from timeloom.nn.modules import GRU, LSTM, RNN, ImplicitGRU
from timeloom.nn.swap import parallelize, sequentialize

__all__ = ["GRU", "LSTM", "RNN", "ImplicitGRU", "Layer", "parallelize", "sequentialize"]
