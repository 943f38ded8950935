"""Shapes of sequences: packed, unbatched, batch-first, ragged and reversed, converted to time-major and back."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence


def unpack(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """Padded, time-major data `(T, B, D)` and lengths `(B,)`, in the packed (sorted) order."""
    sizes = packed.batch_sizes.to(torch.int64)
    steps, batch = len(sizes), int(sizes[0])
    if int(sizes[-1]) == batch:  # all of one length
        return packed.data.view(steps, batch, *packed.data.shape[1:]), torch.full((batch,), steps)
    lengths = (sizes[:, None] > torch.arange(batch, device="cpu")).sum(0)
    padded = packed.data.new_zeros(steps * batch, *packed.data.shape[1:])
    padded = padded.index_copy(0, _packed_order(lengths, steps, packed.data.device), packed.data)
    return padded.view(steps, batch, *padded.shape[1:]), lengths


def pack_like(padded: Tensor, lengths: Tensor | None, packed: PackedSequence) -> PackedSequence:
    """The inverse of `unpack`; without lengths, all sequences have the same length."""
    data = padded.flatten(0, 1)
    data = data if lengths is None else data.index_select(0, _packed_order(lengths, len(padded), padded.device))
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)


def _packed_order(lengths: Tensor, steps: int, device: torch.device) -> Tensor:
    """Places of the valid steps among `(T · B)`, time by time: the order of a PackedSequence's data."""
    valid = torch.arange(steps, device="cpu")[:, None] < lengths
    return valid.flatten().nonzero().squeeze(-1).to(device)


def clear_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """Zeros past the end of each sequence, in place; lengths on the CPU."""
    beyond = (torch.arange(len(x), device="cpu")[:, None] >= lengths).flatten().nonzero().squeeze(-1)
    x.view(-1, *x.shape[2:]).index_fill_(0, beyond.to(x.device), 0)
    return x


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Each sequence reversed in time, `(T, B, ...)`; padding stays at the end. Its own inverse."""
    if lengths is None:
        return x.flip(0)
    time = torch.arange(len(x), device="cpu")[:, None]
    index = torch.where(time < lengths.cpu(), lengths.cpu() - 1 - time, time)
    index = (index * x.shape[1] + torch.arange(x.shape[1], device="cpu")).flatten().to(x.device)
    return x.flatten(0, 1).index_select(0, index).view(x.shape)


def reverse_resets(resets: Tensor, lengths: Tensor | None, following: Tensor | None = None) -> Tensor:
    """Resets of the reversed sequence: a reset between steps t−1 and t comes before step t−1 in reverse.

    A reset right after a sequence's end comes before its first reversed step, where it only matters if the sequence
    continues on another rank: `following` `(B,)` marks the sequences that continue with a reset.
    """
    behind = torch.zeros_like(resets[:1]) if following is None else following.unsqueeze(0)
    return reverse(torch.cat([resets[1:], behind]), lengths)


def mask_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """Zeros past the end of each sequence, whatever values (NaN, too) were there."""
    inside = torch.arange(len(x), device="cpu")[:, None] < lengths.cpu()
    return torch.where(inside.to(x.device).view(*x.shape[:2], *[1] * (x.dim() - 2)), x, torch.zeros_like(x))


def drop(y: Tensor, p: float, lengths: Tensor | None) -> Tensor:
    """Dropout of the valid steps, drawn in the same order as in torch."""
    if lengths is None:
        return F.dropout(y, p)
    order, flat = _packed_order(lengths, len(y), y.device), y.flatten(0, 1)
    return flat.index_copy(0, order, F.dropout(flat.index_select(0, order), p)).view(y.shape)


def permute(part: Tensor, permutation: Tensor | None) -> Tensor:
    """A part of the state `(layers · directions, B, part)` with its sequences in another order."""
    return part if permutation is None else part.index_select(1, permutation)


def check_input(data: Tensor, packed: PackedSequence | None, input_size: int, weight: Tensor) -> None:
    """Torch's checks of the input against the present weights, with torch's error messages."""
    if data.dtype != weight.dtype and not torch.is_autocast_enabled(data.device.type):
        raise ValueError(
            f"RNN input dtype ({data.dtype}) does not match weight dtype ({weight.dtype}). "
            f"Convert input: input.to({weight.dtype}), or convert model: model.to({data.dtype})"
        )
    if packed is not None and data.dim() != 2:
        raise RuntimeError(f"input must have 2 dimensions, got {data.dim()}")
    if data.shape[-1] != input_size:
        raise RuntimeError(f"input.size(-1) must be equal to input_size. Expected {input_size}, got {data.shape[-1]}")
    if data.device != weight.device:
        raise RuntimeError(
            f"Input and parameter tensors are not at the same device, found input tensor at {data.device} and "
            f"parameter tensor at {weight.device}"
        )


def check_hidden(part: Tensor, batched: bool, name: str, x: Tensor) -> None:
    """Torch's checks of an initial state."""
    if not isinstance(part, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(part).__name__}")
    wanted = 3 if batched else 2
    if part.dim() != wanted:
        kind = "batched 3-D" if batched else "unbatched 2-D"
        raise RuntimeError(f"For {kind} input, {name} should also be {wanted}-D but got {part.dim()}-D tensor")
    if part.device != x.device:
        raise RuntimeError(f"{name} is on {part.device}, the input on {x.device}: they must agree")
    mixed = part.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type)
    if mixed or not part.is_floating_point():
        raise RuntimeError(f"{name} has dtype {part.dtype}, the input {x.dtype}: they must agree")


def check_lengths(lengths: Tensor, steps: int, batch: int) -> Tensor:
    """Lengths as int64 on the CPU, a copy, or an error that says what is wrong."""
    if not isinstance(lengths, Tensor):
        if not isinstance(lengths, list | tuple) or not all(isinstance(length, Integral) for length in lengths):
            raise TypeError(f"lengths must be a tensor or a list of {batch} whole numbers, got {lengths!r}")
        lengths = torch.tensor([int(length) for length in lengths], dtype=torch.int64, device="cpu")
    check_kind_of_lengths(lengths, batch)
    lengths = lengths.to(device="cpu", dtype=torch.int64, copy=True)
    outside = ((lengths < 0) | (lengths > steps)).nonzero().flatten().tolist()
    if outside:
        worst = int(lengths[outside[0]])
        raise ValueError(f"lengths must lie between 0 and T={steps}; sequence {outside[0]} has length {worst}")
    return lengths


def check_kind_of_lengths(lengths: Tensor, batch: int) -> None:
    """Raise if the shape or dtype of lengths is wrong; values are not checked."""
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape ({batch},), one for each sequence; got {tuple(lengths.shape)}")
    if lengths.dtype == torch.bool or lengths.is_floating_point() or lengths.is_complex():
        raise TypeError(f"lengths must hold whole numbers, got {lengths.dtype}")


def check_resets(resets: Tensor, steps: int, batch: int, batch_first: bool, device: torch.device) -> Tensor:
    """Resets as bool `(T, B)`, a copy, or an error that says what is wrong."""
    order, expected = ("(B, T)", (batch, steps)) if batch_first else ("(T, B)", (steps, batch))
    if not isinstance(resets, Tensor) or resets.dtype != torch.bool:
        given = resets.dtype if isinstance(resets, Tensor) else type(resets).__name__
        raise TypeError(f"resets must be a bool tensor of shape {order} = {expected}, got {given}")
    if tuple(resets.shape) != expected:
        raise ValueError(f"resets must have shape {order} = {expected}, got {tuple(resets.shape)}")
    if resets.device != device:
        raise ValueError(f"resets is on {resets.device}, the input on {device}: they must agree")
    return (resets.t() if batch_first else resets).clone(memory_format=torch.contiguous_format)
