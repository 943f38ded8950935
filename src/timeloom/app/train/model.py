"""The network of the application: recurrent layers with what makes deep stacks of them trainable, and a head.

Annotations are not postponed here: TorchScript reads those of classes as they stand.
"""

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from timeloom.app.data.records import NUMERIC, PER_STEP, Task
from timeloom.app.data.splits import Examples
from timeloom.app.errors import InputError
from timeloom.app.named_options import split_spec, with_options
from timeloom.app.train.config import ModelConfig
from timeloom.nn import GRU, LSTM, RNN, ImplicitGRU
from timeloom.nn.base import Recurrent
from timeloom.solvers.base import Solver, resolve
from timeloom.solvers.mgrit import MGRIT

if TYPE_CHECKING:
    from timeloom.app.train.share import Part

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
        self.residual, self.bidirectional = config.residual, config.bidirectional
        self.after = nn.LayerNorm(size, elementwise_affine=False) if config.norm and config.residual else nn.Identity()
        self.mlp = _perceptron(size, size, size) if config.mlp else None

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        x = self.before(x)
        return self.finish(x, self._states(x, lengths))

    def finish(self, x: Tensor, states: Tensor) -> Tensor:
        """What comes after the recurrence, from its input and its states."""
        y: Tensor = self.dropout(self.mix(states))
        y = self.after(x + y if self.residual else y)
        if self.mlp is not None:
            y = y + self.mlp(y)
        return y

    def _states(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """All states of the layer, timeloom's or torch's own, zero where a series has ended."""
        if not is_scripting():  # noqa: SIM102 (TorchScript does not look into this block)
            if isinstance(self.recurrent, Recurrent):
                ours: Tensor = self.recurrent(x, lengths=lengths)[0]
                return ours
        if lengths is None or not self.bidirectional:
            states: Tensor = self.recurrent(x)[0]
            # One direction meets padding after all real steps: it need not be packed, which is slow on a CPU.
            return states if lengths is None else states * _real(x, lengths).unsqueeze(-1)
        packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        return pad_packed_sequence(self.recurrent(packed)[0], total_length=len(x))[0]


class SequenceModel(nn.Module):
    """Inputs `(T, B, D)` to answers: `(B, K)`, or `(T, B, K)` for a label or a number at every step.

    It carries the scale of its data.
    """

    offset: Tensor
    """(D,): subtracted from the inputs, which are then multiplied by `scale`."""
    scale: Tensor
    answer_offset: Tensor
    """(): added to answers that are numbers, after they were multiplied by `answer_scale`."""
    answer_scale: Tensor

    def __init__(self, config: ModelConfig, channels: int, outputs: int, task: Task, solver: Solver) -> None:
        super().__init__()
        size = config.hidden
        self.task, self.pooling = task, config.pooling
        self.per_step, self.numeric = task in PER_STEP, task in NUMERIC
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

    def forward(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Answers to whole series."""
        x = self.states(inputs, lengths)
        if self.per_step:
            answers: Tensor = self.head(x)
        elif self.pooling == "last":
            answers = self.head(_last(x, lengths))
        else:
            answers = _mean(self.head(x), lengths)
        return self.scaled(answers)

    def answers_of(self, inputs: Tensor, lengths: Tensor | None, part: "Part") -> Tensor:
        """Answers to series of which this process has some steps; `part` says which and who has the others."""
        x = self.states(inputs, lengths)
        if self.per_step:
            answers: Tensor = self.head(x)
        elif self.pooling == "last":
            answers = self.head(part.last(x, lengths))
        else:
            answers = part.mean(self.head(x), lengths)
        return self.scaled(answers)

    def states(self, inputs: Tensor, lengths: Tensor | None) -> Tensor:
        """What the last layer gives, `(T, B, n)`."""
        x: Tensor = self.encoder((inputs - self.offset) * self.scale)
        for block in self.blocks:
            x = block(x, lengths)
        return x

    def scaled(self, answers: Tensor) -> Tensor:
        """Numbers in the scale of the targets; classes as they are."""
        return answers * self.answer_scale + self.answer_offset if self.numeric else answers

    def fit_scale(self, train: Examples) -> None:
        """Take mean and deviation of every channel, and of targets that are numbers, from the training series."""
        steps = sum(len(values) for values in train.series)
        mean = _total(values.double().sum(dim=0) for values in train.series) / steps
        squares = _total((values.double() - mean).square().sum(dim=0) for values in train.series) / steps
        self.offset.copy_(mean)
        self.scale.copy_(1 / _deviation(squares.sqrt(), mean))
        if self.numeric:
            targets = torch.cat([target.flatten() for target in train.targets]).double()
            targets = targets[~targets.isnan()]
            self.answer_offset.copy_(targets.mean())
            self.answer_scale.copy_(_deviation(targets.std(correction=0), targets.mean()))

    def recurrent_layers(self) -> list[Recurrent]:
        """timeloom's layers inside, whose reports say what the solver did."""
        return [module for module in self.modules() if isinstance(module, Recurrent)]


def _deviation(found: Tensor, mean: Tensor) -> Tensor:
    """A deviation to divide by, however small the unit of the numbers; 1 where there is none but float32's rounding."""
    return torch.where(found > 1e-6 * mean.abs().clamp_min(1e-30), found, 1.0)


def _total(parts: Iterable[Tensor]) -> Tensor:
    """Their sum, one at a time: the series of a large set do not fit into memory twice."""
    return reduce(torch.add, parts)


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
    return (x * _real(x, lengths).unsqueeze(-1)).sum(dim=0) / lengths.to(x.device).unsqueeze(-1)


def _real(x: Tensor, lengths: Tensor) -> Tensor:
    """(T, B): which steps are not padding."""
    return torch.arange(len(x), device=x.device).unsqueeze(1) < lengths.to(x.device)
