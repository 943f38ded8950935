"""The base class of steps: a module `cell(state, x) -> state` that knows its widths and can be created anew."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor, nn


class Step(nn.Module):
    """One step of a recurrent network, for `timeloom.unroll` and `timeloom.Layer`.

    A subclass calls `super().__init__(input_size, hidden_size)`, makes its parameters, and writes `forward(state, x)`:
    state `(N, hidden)` (a tuple of such where `parts` is more than one), x `(N, input_size)`, to the next state. Its
    first part is the output.
    """

    parts = 1
    """Number of tensors that make up the state."""
    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "_given", (args, kwargs))
        return made

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        self.input_size, self.hidden_size = input_size, hidden_size

    def again(self, input_size: int) -> Self:
        """A cell of the same kind and options with fresh parameters, for inputs of this width."""
        args, kwargs = self._given
        if args:
            args = (input_size, *args[1:])
        else:
            kwargs = {**kwargs, "input_size": input_size}
        like = next(self.parameters())
        return type(self)(*args, **kwargs).to(like.device, like.dtype)

    def initial(self, batch: int) -> Tensor | tuple[Tensor, ...]:
        """A state of zeros to start from."""
        zeros = next(self.parameters()).new_zeros(batch, self.hidden_size)
        return zeros if self.parts == 1 else (zeros,) * self.parts

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"


def uniform(*shape: int, units: int) -> nn.Parameter:
    """Torch's own initialisation of recurrent weights: uniform within `1 / √units`."""
    return nn.Parameter(torch.empty(shape).uniform_(-1 / math.sqrt(units), 1 / math.sqrt(units)))


def by_blocks(weight: Tensor, value: Tensor) -> Tensor:
    """Block-diagonal product: value `(N, blocks · in)` and weight `(blocks, in, out)` to `(N, blocks · out)`."""
    return torch.einsum("nbi,bio->nbo", value.unflatten(-1, (len(weight), -1)), weight).flatten(-2)


def check_blocks(name: str, blocks: int, units: int) -> int:
    if not isinstance(blocks, int) or blocks < 1 or units % blocks:
        raise ValueError(f"{name} must divide the {units} units, got {blocks!r}")
    return blocks
