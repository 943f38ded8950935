"""Cells: the mathematics of one step, its derivatives, and the projection of all inputs by one product.

Two kinds. A `Cell` is what solvers work with. A `Step` is a module `cell(state, x) -> state` for `timeloom.unroll` and
`timeloom.Layer`, written in torch operations, from which kernels are generated.
"""

from timeloom.cells.base import Cell
from timeloom.cells.block_gru import BlockGRU
from timeloom.cells.cfc import CfC
from timeloom.cells.ctrnn import CTRNN
from timeloom.cells.generic import GenericCell
from timeloom.cells.gru import GRUCell
from timeloom.cells.implicit_gru import ImplicitGRUCell
from timeloom.cells.layer_norm_gru import LayerNormGRU
from timeloom.cells.layer_norm_lstm import LayerNormLSTM
from timeloom.cells.li_gru import LiGRU
from timeloom.cells.lstm import LSTMCell
from timeloom.cells.minimal_gru import MinimalGRU
from timeloom.cells.peephole_lstm import PeepholeLSTM
from timeloom.cells.rnn import RNNCell
from timeloom.cells.slstm import SLSTM
from timeloom.cells.step import Step

__all__ = [
    "CTRNN",
    "SLSTM",
    "BlockGRU",
    "Cell",
    "CfC",
    "GRUCell",
    "GenericCell",
    "ImplicitGRUCell",
    "LSTMCell",
    "LayerNormGRU",
    "LayerNormLSTM",
    "LiGRU",
    "MinimalGRU",
    "PeepholeLSTM",
    "RNNCell",
    "Step",
]
