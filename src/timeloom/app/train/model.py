"""The network of the application: recurrent layers with what makes deep stacks of them trainable, and a head."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from timeloom.app.data.records import Task
from timeloom.app.data.splits import Examples
from timeloom.app.errors import InputError
from timeloom.app.named_options import split_spec, with_options
from timeloom.app.train.config import ModelConfig
from timeloom.nn import GRU, LSTM, RNN, ImplicitGRU
from timeloom.nn.base import Recurrent
from timeloom.solvers.base import Solver, resolve
from timeloom.solvers.mgrit import MGRIT

if TYPE_CHECKING:
    from timeloom.app.train.ranks import Part

_CELLS: dict[str, type[Recurrent]] = {"gru": GRU, "implicit-gru": ImplicitGRU, "lstm": LSTM, "rnn": RNN}


def solver_of(text: str) -> Solver:
    """A solver from its name and options, as in `shooting:chunk=256`; mgrit-paper is multigrid as published."""
    name, options = split_spec(text)
    try:
        solver = MGRIT.paper() if name == "mgrit-paper" else resolve(name)
    except ValueError as error:
        raise InputError(str(error)) from None
    return with_options(solver, options, name)


class Block(nn.Module):
    """A recurrent layer: normalise, run, mix both directions, drop, add, normalise, perceptron."""

    def __init__(self, config: ModelConfig, inputs: int, solver: Solver) -> None:
        super().__init__()
        size = config.hidden
        self.before = nn.LayerNorm(inputs, elementwise_affine=False) if config.norm else nn.Identity()
        layer: Any = _CELLS[config.cell]
        self.recurrent: nn.RNNBase = layer(inputs, size, bidirectional=config.bidirectional, solver=solver)
        self.mix = nn.Linear(2 * size, size) if config.bidirectional else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.residual = config.residual
        self.after = nn.LayerNorm(size, elementwise_affine=False) if config.norm and config.residual else nn.Identity()
        self.mlp = _perceptron(size, size, size) if config.mlp else None

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        x = self.before(x)
        y: Tensor = self.dropout(self.mix(_run(self.recurrent, x, lengths)))
        y = self.after(x + y if self.residual else y)
        if self.mlp is not None:
            y = y + self.mlp(y)
        return y


class SequenceModel(nn.Module):
    """Inputs `(T, B, D)` to answers: `(B, K)`, or `(T, B, K)` for a label at every step.

    It carries the scale of its data.
    """

    offset: Tensor
    """(D,): subtracted from the inputs, which are then multiplied by `scale`."""
    scale: Tensor
    answer_offset: Tensor
    """(): added to the answers of a regression, after they were multiplied by `answer_scale`."""
    answer_scale: Tensor

    def __init__(self, config: ModelConfig, channels: int, outputs: int, task: Task, solver: Solver) -> None:
        super().__init__()
        size = config.hidden
        self.task, self.pooling = task, config.pooling
        self.register_buffer("offset", torch.zeros(channels))
        self.register_buffer("scale", torch.ones(channels))
        self.register_buffer("answer_offset", torch.zeros(()))
        self.register_buffer("answer_scale", torch.ones(()))
        encode = config.mlp or config.residual  # a residual sum needs inputs of the layers' size
        self.encoder = (
            _perceptron(channels, size, size) if config.mlp else nn.Linear(channels, size) if encode else nn.Identity()
        )
        first = size if encode else channels
        self.blocks = nn.ModuleList(Block(config, size if i else first, solver) for i in range(config.layers))
        self.head = _perceptron(size, size, outputs) if config.mlp else nn.Linear(size, outputs)

    def forward(self, inputs: Tensor, lengths: Tensor | None = None, part: Part | None = None) -> Tensor:
        """Answers to whole series; to some steps of them, where `part` says which and who has the others."""
        x: Tensor = self.encoder((inputs - self.offset) * self.scale)
        for block in self.blocks:
            x = block(x, lengths)
        if self.task == "labelling":
            answers: Tensor = self.head(x)
        elif self.pooling == "last":
            answers = self.head(_last(x, lengths) if part is None else part.last(x, lengths))
        else:
            x = self.head(x)
            answers = _mean(x, lengths) if part is None else part.mean(x, lengths)
        return answers * self.answer_scale + self.answer_offset if self.task == "regression" else answers

    def fit_scale(self, train: Examples) -> None:
        """Take mean and deviation of every channel, and of the targets of a regression, from the training series."""
        steps = sum(len(values) for values in train.series)
        mean = _total(values.double().sum(dim=0) for values in train.series) / steps
        squares = _total((values.double() - mean).square().sum(dim=0) for values in train.series) / steps
        self.offset.copy_(mean)
        self.scale.copy_(1 / squares.sqrt().clamp_min(1e-6))
        if self.task == "regression":
            targets = torch.stack(train.targets).double()
            self.answer_offset.copy_(targets.mean())
            self.answer_scale.copy_(targets.std(correction=0).clamp_min(1e-6))

    def recurrent_layers(self) -> list[Recurrent]:
        """timeloom's layers inside, whose reports say what the solver did."""
        return [module for module in self.modules() if isinstance(module, Recurrent)]


def _total(parts: Iterable[Tensor]) -> Tensor:
    """Their sum, one at a time: the series of a large set do not fit into memory twice."""
    return reduce(torch.add, parts)


def _run(layer: nn.RNNBase, x: Tensor, lengths: Tensor | None) -> Tensor:
    """All states of a layer, timeloom's or torch's own."""
    if lengths is None:
        states: Tensor = layer(x)[0]
    elif isinstance(layer, Recurrent):
        states = layer(x, lengths=lengths)[0]
    else:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        states = pad_packed_sequence(layer(packed)[0], total_length=len(x))[0]
    return states


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _last(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The last real step of every series."""
    if lengths is None:
        return x[-1]
    return x[lengths.to(x.device) - 1, torch.arange(x.shape[1], device=x.device)]


def _mean(x: Tensor, lengths: Tensor | None) -> Tensor:
    """The mean over the real steps of every series."""
    if lengths is None:
        return x.mean(dim=0)
    ends = lengths.to(x.device)
    real = torch.arange(len(x), device=x.device).unsqueeze(1) < ends
    return (x * real.unsqueeze(-1)).sum(dim=0) / ends.unsqueeze(-1)
