"""GRU, LSTM and RNN, torch's modules parallel in time, and the implicit GRU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from timeloom.cells import Cell, GRUCell, ImplicitGRUCell, LSTMCell, RNNCell
from timeloom.nn.base import Recurrent
from timeloom.nn.sequence import check_hidden, permute
from timeloom.nn.stacked import Hidden
from timeloom.solvers.base import Solver


class _OnePart(Recurrent):
    """Modules whose state is h alone."""

    def _hidden_in(self, hx: Any, batched: bool, batch: int, like: Tensor, permutation: Tensor | None) -> Hidden:
        if hx is None:
            return (like.new_zeros(self._stacked, batch, self.hidden_size),)
        h = _as_batched(hx, batched, "hx", like)
        expected = (self._stacked, batch, self.hidden_size)
        self.check_hidden_size(h, expected)
        h = permute(h, permutation)
        return (h.clone(memory_format=torch.contiguous_format),)  # a copy: it is kept, and users may write into theirs

    def _hidden_out(self, parts: Hidden) -> Tensor:
        return parts[0]


class GRU(_OnePart, nn.GRU):
    """`torch.nn.GRU`, parallel in time: same arguments, parameters, results.

    solver: a name or an object from `timeloom.solvers`.
    recurrent_dropout: in training, the share of h that the recurrent product does not see, one mask a sequence.
    zoneout: the probability that a unit keeps its value over a step; in `eval()` its expectation.
    weight_dropout: in training, the share of the recurrent matrix that a call leaves out.
    A call takes `lengths=`, `resets=` and `guess=` too (see `forward`), and `reports` says what it did.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, device: Any = None, dtype: Any = None,
        *, solver: str | Solver = "auto", recurrent_dropout: float = 0.0, zoneout: float = 0.0,
        weight_dropout: float = 0.0, **given: Any,
    ) -> None:  # fmt: skip
        """`given` is for torch to refuse: `proj_size` with the error that torch has for it."""
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device, dtype=dtype,
            **given,
        )  # fmt: skip
        self._start(solver)
        self._drop(recurrent_dropout, zoneout, weight_dropout)

    def _bare(self, *weights: Any) -> Cell:
        return GRUCell.of(*weights[:4])

    def _cell(self, x: Tensor, *weights: Any) -> tuple[Cell, Tensor]:
        return GRUCell.project(x, *weights[:4])


class ImplicitGRU(_OnePart):
    """The multigrid paper's GRU, with an implicit Euler step as decay; arguments and parameters of `torch.nn.GRU`.

        g = 1 − z      h⁺ = (h + g ⊙ n) / (1 + g)

    It is a different network from the GRU (a step keeps at least half of h), so weights trained for one do not fit the
    other. `solver="sequential"` runs it one step after the other: on autograd's tape, or on a GPU in float32 in one
    generated kernel.

    solver: a name or an object from `timeloom.solvers`.
    A call takes `lengths=`, `resets=` and `guess=` too (see `forward`), and `reports` says what it did.
    """

    has_torch_twin = False

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, device: Any = None, dtype: Any = None,
        *, solver: str | Solver = "auto",
    ) -> None:  # fmt: skip
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype,
        )  # fmt: skip
        self._start(solver)

    def _bare(self, *weights: Any) -> Cell:
        return ImplicitGRUCell.of(*weights[:4])

    def _cell(self, x: Tensor, *weights: Any) -> tuple[Cell, Tensor]:
        return ImplicitGRUCell.project(x, *weights[:4])


class RNN(_OnePart, nn.RNN):
    """`torch.nn.RNN`, parallel in time: same arguments, parameters, results.

    solver: a name or an object from `timeloom.solvers`.
    recurrent_dropout: in training, the share of h that the recurrent product does not see, one mask a sequence.
    zoneout: the probability that a unit keeps its value over a step; in `eval()` its expectation.
    weight_dropout: in training, the share of the recurrent matrix that a call leaves out.
    A call takes `lengths=`, `resets=` and `guess=` too (see `forward`), and `reports` says what it did.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, device: Any = None, dtype: Any
        = None, *, solver: str | Solver = "auto", recurrent_dropout: float = 0.0, zoneout: float = 0.0,
        weight_dropout: float = 0.0, **given: Any,
    ) -> None:  # fmt: skip
        """`given` as for `GRU`."""
        super().__init__(
            input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype, **given,
        )  # fmt: skip
        self._start(solver)
        self._drop(recurrent_dropout, zoneout, weight_dropout)

    def _bare(self, *weights: Any) -> Cell:
        return RNNCell(weights[1], self.nonlinearity)

    def _cell(self, x: Tensor, *weights: Any) -> tuple[Cell, Tensor]:
        return RNNCell.project(x, *weights[:4], nonlinearity=self.nonlinearity)


class LSTM(Recurrent, nn.LSTM):
    """`torch.nn.LSTM`, parallel in time: same arguments, parameters, results.

    solver: a name or an object from `timeloom.solvers`.
    recurrent_dropout: in training, the share of h that the recurrent product does not see, one mask a sequence.
    zoneout: the probability that a unit keeps its value over a step (a pair: of h and of c); in `eval()` its
        expectation.
    weight_dropout: in training, the share of the recurrent matrix that a call leaves out.
    A call takes `lengths=`, `resets=` and `guess=` too (see `forward`), and `reports` says what it did.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0, device: Any = None, dtype: Any = None,
        *, solver: str | Solver = "auto", recurrent_dropout: float = 0.0,
        zoneout: float | tuple[float, float] = 0.0, weight_dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size,
            device=device, dtype=dtype,
        )  # fmt: skip
        self._start(solver)
        self._drop(recurrent_dropout, zoneout, weight_dropout)

    def _bare(self, *weights: Any) -> Cell:
        return LSTMCell(weights[1], weights[4])

    def _cell(self, x: Tensor, *weights: Any) -> tuple[Cell, Tensor]:
        return LSTMCell.project(x, *weights)

    def _check_given(self, hx: Any) -> None:
        if not isinstance(hx, tuple | list) or len(hx) != 2:
            raise TypeError(f"LSTM: expected hx to be a pair (h_0, c_0), got {type(hx).__name__}")

    def _hidden_in(self, hx: Any, batched: bool, batch: int, like: Tensor, permutation: Tensor | None) -> Hidden:
        widths = (self.proj_size or self.hidden_size, self.hidden_size)
        if hx is None:
            return tuple(like.new_zeros(self._stacked, batch, width) for width in widths)
        self._check_given(hx)
        pair = tuple(_as_batched(part, batched, name, like) for part, name in zip(hx, ("h_0", "c_0"), strict=True))
        for part, width, name in zip(pair, widths, ("hidden[0]", "hidden[1]"), strict=True):
            self.check_hidden_size(part, (self._stacked, batch, width), f"Expected {name} size {{}}, got {{}}")
        return tuple(permute(part, permutation) for part in pair)

    def _hidden_out(self, parts: Hidden) -> tuple[Tensor, ...]:
        return tuple(parts)


def _as_batched(hx: Tensor, batched: bool, name: str, x: Tensor) -> Tensor:
    """An initial state with its batch dimension, checked."""
    check_hidden(hx, batched, name, x)
    return hx if batched else hx.unsqueeze(1)
