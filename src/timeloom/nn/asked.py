"""The arguments of a module's call, and errors for those that are unsupported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from timeloom.distributed.group import TimeGroup
from timeloom.nn import torch_layer
from timeloom.solve.warm_starts import GivenStates, Guess, WarmBatch, check_batch, check_states
from timeloom.torch_state.precision import SOLVED
from timeloom.torch_state.transforms import WHERE

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent


class Asked(NamedTuple):
    """The arguments of a call, and its context.

    data: the input, or the data of a PackedSequence.
    group: the ranks that share the sequences.
    inside: whether the call is inside a transform of torch.func.
    """

    data: Tensor
    packed: PackedSequence | None
    hx: Any
    lengths: Tensor | None
    resets: Tensor | None
    guess: Any
    return_states: bool
    group: TimeGroup | None
    inside: bool

    @property
    def marked(self) -> bool:
        """Whether there are lengths or resets."""
        return self.lengths is not None or self.resets is not None

    @property
    def batched(self) -> bool:
        return self.packed is not None or self.data.dim() == 3

    @property
    def permutation(self) -> Tensor | None:
        """The order in which a PackedSequence holds the batch."""
        return None if self.packed is None else self.packed.sorted_indices


def check(module: Recurrent, asked: Asked) -> str | None:
    """Raise for unsupported arguments; returns why sweeps cannot run, if torch's own layer may instead, else None."""
    data, packed, group, marked = asked.data, asked.packed, asked.group, asked.marked
    if packed is not None and marked:
        raise ValueError("a PackedSequence carries its own lengths: give a padded tensor to use lengths= or resets=")
    if not isinstance(data, Tensor) and not hasattr(type(data), "__torch_function__"):
        raise TypeError(f"input must be a Tensor or a PackedSequence, got {type(data).__name__}")
    obstacle = torch_layer.obstacle(module, data, asked.hx)
    if asked.inside:
        _refuse_inside(module, asked)
    if obstacle:
        _refuse_without_sweeps(module, asked, obstacle)
    if asked.return_states and (packed is not None or group is not None):
        where = "over many ranks" if packed is None else "for a PackedSequence: give a padded tensor and lengths="
        raise NotImplementedError(f"there is no return_states= {where}")
    if group is not None:
        _refuse_over_ranks(module, asked, obstacle)
    return obstacle


def _refuse_inside(module: Recurrent, asked: Asked) -> None:
    no = None
    if asked.group is not None:
        no = "time ranks"
    elif asked.guess is not None:
        no = "guess="
    elif asked.return_states and module._masks:
        no = "return_states= with zoneout="
    if no is not None:
        raise NotImplementedError(f"there are no {no} {WHERE}")


def _refuse_without_sweeps(module: Recurrent, asked: Asked, obstacle: str) -> None:
    """Raise for options that torch's own layer lacks, unless a loop over steps can run them in place of sweeps."""
    data = asked.data
    traced = torch._C._get_tracing_state() is not None  # a traced loop would fix the number of steps
    strange = type(data) not in (Tensor, nn.Parameter) or data.layout != torch.strided
    strange = strange or torch_layer.wrapped_weight(module) is not None or data.dtype not in SOLVED
    if not traced and not strange:
        return
    if asked.marked or asked.return_states:
        given = "lengths= and resets= are" if asked.marked else "return_states= is"
        raise NotImplementedError(f"{given} for timeloom's own sweeps, and there are {obstacle}")
    if module._masks:
        raise NotImplementedError(
            f"recurrent_dropout= and zoneout= are for timeloom's own steps, and there are {obstacle}: set them to 0"
        )


def _refuse_over_ranks(module: Recurrent, asked: Asked, obstacle: str | None) -> None:
    if module._drops:
        raise NotImplementedError(
            f"over many ranks there is no dropout inside the recurrence{module._dropping}: every rank would draw its "
            "own masks; set it to 0"
        )
    if obstacle or asked.packed is not None or asked.guess is not None:
        no = "no guess=" if asked.guess is not None else "no packed sequences: give a padded tensor and lengths="
        raise NotImplementedError(f"over many ranks there are {obstacle or no}")


def guess_of(module: Recurrent, asked: Asked, guess: Any, steps: int, batch: int) -> Guess:
    """The guess, checked, in the order of the batch."""
    permutation, batched = asked.permutation, asked.batched
    if isinstance(guess, WarmBatch):
        check_batch(guess, batch)
        return guess if permutation is None else guess.permuted(permutation)
    if module._stacked > 1 or permutation is not None:
        raise ValueError(
            f"guess as tensors is for one layer, one direction and a padded input; this call has {module._stacked} "
            "layers and directions: use timeloom.WarmStarts"
        )
    lead = (steps,) if not batched else (batch, steps) if module.batch_first else (steps, batch)
    width = module.proj_size or module.hidden_size
    shapes = tuple((*lead, part) for part in ((width, module.hidden_size) if module.mode == "LSTM" else (width,)))
    states = torch.cat(check_states(guess, shapes, len(shapes) > 1), -1)
    states = states if batched else states.unsqueeze(1)
    return GivenStates(states.transpose(0, 1) if module.batch_first and batched else states)
