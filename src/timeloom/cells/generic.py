"""Any function or module `f(h, x) -> h` as a cell: derivatives by autograd, Jacobian structure found by probing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from timeloom.cells.base import Cell
from timeloom.cells.coarse import UserStep

State = Tensor | tuple[Tensor, ...]
PROBED_ROWS = 4
"""Rows on which a Jacobian's structure is probed."""
SHAKEN = 32
"""Units of rounding by which rows are moved to see how rounding changes their results."""


class GenericCell(Cell):
    """A user's step, batched over rows: `function(h, x)` with h `(N, ...)` or a tuple of such, x `(N, ...)`.

    Its parameters live in the function (a closure, an nn.Module), so it has no `weights` of its own; its gate
    gradients are the adjoints themselves, and one differentiated evaluation over all steps turns them into every other
    gradient (see `timeloom.solve.autograd`).
    """

    whole_state_out = True

    def __init__(self, function: Callable[[Any, Tensor], Any], initial: State, input_shape: Sequence[int]) -> None:
        _check_order(function)
        parts = initial if isinstance(initial, tuple) else (initial,)
        self.function = function
        self.is_tuple = isinstance(initial, tuple)
        self.shapes = tuple(tuple(part.shape[1:]) for part in parts)
        self.input_shape = tuple(input_shape)
        self.parts = tuple(
            part[:1].numel() if len(part) else part.new_empty(1, *part.shape[1:]).numel() for part in parts
        )
        self.weights = ()
        self.gate_width = self.size
        self._diagonal: bool | None = None

    def pack(self, state: State) -> Tensor:
        """A user's state as one flat tensor: `(N, ...)` or a tuple of them to `(N, S)`."""
        parts = state if isinstance(state, tuple) else (state,)
        return torch.cat([part.flatten(1) if part.dim() > 1 else part.unsqueeze(1) for part in parts], 1)

    def unpack(self, flat: Tensor) -> State:
        """The reverse of `pack`, for any leading dimensions."""
        return self.shaped(flat.split(self.parts, -1))

    def shaped(self, flat: Sequence[Tensor]) -> State:
        """Flat parts `(..., part)` as the user's state."""
        parts = tuple(p.reshape(*p.shape[:-1], *s) for p, s in zip(flat, self.shapes, strict=True))
        return parts if self.is_tuple else parts[0]

    def check_repeats(self, state: Tensor, u: Tensor) -> Tensor:
        """The next state; raises if a second call on the same rows gives another one."""
        out, again = self.step(state, u), self.step(state, u)
        difference = float((again - out).nan_to_num(posinf=0, neginf=0).abs().max())
        if difference > _rounding(out):
            raise ValueError(
                f"the cell is not deterministic: two calls on the same input differ by {difference:.1e} (dropout? call "
                f".eval(), or draw its noise before and give it as a part of x; a counter or a memory of its own? make "
                f"it a part of the state; changes of its arguments in place? make new tensors). "
                f'solver="sequential" runs such a cell step by step'
            )
        return out

    def check_rows(self, state: Tensor, u: Tensor) -> None:
        """Raise if rows give another result alone than in the batch.

        Tested as they are and nearby, since the rows of an initial state are often all alike. A step may not be made
        for states nearby (a covariance, say).

        """
        self._check_rows(state, u)
        generator = torch.Generator(device=state.device).manual_seed(0)
        noise = torch.randn(2 * len(state), self.size, generator=generator, device=state.device, dtype=state.dtype)
        near, inputs = torch.cat([state, state]) + 0.01 * noise, torch.cat([u, u])
        try:
            self.step(near, inputs)
        except Exception:  # whatever a user's step says of such states
            return
        self._check_rows(near, inputs)

    def _check_rows(self, state: Tensor, u: Tensor) -> None:
        out = self.step(state, u)
        tolerance = _rounding(out)
        for row in range(min(len(out), PROBED_ROWS)):
            alone = self.step(state[[row, row]], u[[row, row]])  # twice: batch norm refuses a single row
            difference = float((alone - out[row]).abs().max())
            if difference > tolerance and difference > self._shaken(state, u, out):
                raise ValueError(
                    f"row {row} gives another result alone than in the batch (difference {difference:.1e}): a cell "
                    f"must treat rows independently (batch norm? a reduction over dim 0?), since chunks of time "
                    f'are rows, too. solver="sequential" runs such a cell step by step'
                )

    def _shaken(self, state: Tensor, u: Tensor, out: Tensor) -> float:
        """What rounding of the state and of the inputs may make of the next state, many times over: of a step whose
        working is far larger than its result, more than `_rounding` allows.
        """
        generator = torch.Generator(device="cpu").manual_seed(0)

        def shake(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            return tensor + tensor * (SHAKEN * torch.finfo(tensor.dtype).eps) * signs.to(tensor)

        return float((self.step(shake(state), shake(u)) - out).abs().nan_to_num(posinf=0).max())

    def step(self, state: Tensor, u: Tensor) -> Tensor:
        out = self.function(self.unpack(state), u.reshape(u.shape[0], *self.input_shape))
        self._check(out, state.shape[0])
        packed = self.pack(out)
        if packed.dtype != state.dtype:
            raise TypeError(f"the cell returned {packed.dtype} for a state of {state.dtype}: it must keep the dtype")
        return packed

    def call_own(self, function: UserStep, state: Tensor, u: Tensor, span: Tensor) -> Tensor:
        out = function(self.unpack(state), u.reshape(u.shape[0], *self.input_shape), span)
        self._check(out, state.shape[0], "the coarse step")
        return self.pack(out)

    def _check(self, out: Any, rows: int, who: str = "the cell") -> None:
        parts = out if isinstance(out, tuple) else (out,)
        expected = [(rows, *shape) for shape in self.shapes]
        if isinstance(out, tuple) == self.is_tuple and all(isinstance(part, Tensor) for part in parts):
            given = [tuple(part.shape) for part in parts]
            if given == expected:
                return
            raise ValueError(f"{who} returned a state of shape {given}, expected {expected} (the shape it was given)")
        kind = f"a tuple of {len(self.shapes)} tensors" if self.is_tuple else "a tensor"
        raise TypeError(f"{who} returned {type(out).__name__}, expected {kind} like the state it was given")

    def vjp(self, state: Tensor, u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            out = self.step(state, u.detach())
        return _pull_back(out, state, grad), grad

    def is_diagonal(self, state: Tensor, u: Tensor) -> bool:
        """Whether no unit depends on another, tested on a few of the given rows and on random states around them.

        Remembered until a row shows otherwise (see `decay`).
        """
        if self._diagonal is None:
            rows = spread(len(state), state.device)
            generator = torch.Generator(device=state.device).manual_seed(0)
            noise = torch.randn(state[rows].shape, generator=generator, device=state.device, dtype=state.dtype)
            probes = torch.cat([state[rows], state[rows] + noise])
            jacobian = self._dense(probes, torch.cat([u[rows], u[rows]]))
            off_diagonal = jacobian - torch.diag_embed(jacobian.diagonal(dim1=-2, dim2=-1))
            self._diagonal = bool((off_diagonal == 0).all())
        return self._diagonal

    def decay(self, state: Tensor, u: Tensor) -> Tensor:
        found = self._if_diagonal(state, u)
        return self._dense(state, u).diagonal(dim1=-2, dim2=-1) if found is None else found

    def diagonal(self, state: Tensor, u: Tensor) -> Tensor:
        return self.decay(state, u)

    def jacobian(self, state: Tensor, u: Tensor) -> Tensor:
        found = self._if_diagonal(state, u)
        return self._dense(state, u) if found is None else torch.diag_embed(found)

    def _if_diagonal(self, state: Tensor, u: Tensor) -> Tensor | None:
        """The diagonal of the Jacobian `(N, S)` if the Jacobian is diagonal at all these rows; else None.

        A few probed rows may look diagonal while others are not (a threshold that no probed row exceeds). For a
        diagonal Jacobian `s ⊙ Jᵀs` is the same for every vector s of signs: two of them are compared, on all rows.
        """
        if not self.is_diagonal(state, u):
            return None
        with torch.enable_grad():
            leaf = state.detach().requires_grad_()
            out = self.step(leaf, u.detach())
        generator = torch.Generator(device="cpu").manual_seed(0)
        signs = (torch.randint(0, 2, (1, self.size), generator=generator) * 2 - 1).to(state).expand_as(state)
        found, signed = _pull_back(out, leaf, torch.ones_like(state)), _pull_back(out, leaf, signs) * signs
        if torch.allclose(found, signed, rtol=0, atol=0, equal_nan=True):
            return found
        self._diagonal = False
        return None

    def _dense(self, state: Tensor, u: Tensor) -> Tensor:
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            out = self.step(state, u.detach())
        rows = []
        for unit in range(self.size):
            grad = torch.zeros_like(out)
            grad[:, unit] = 1
            rows.append(_pull_back(out, state, grad))
        return torch.stack(rows, 1)

    def input_grads(self, gate_grads: Tensor) -> Tensor:
        raise NotImplementedError("a generic cell's input gradients come from its differentiated evaluation")

    def weight_grads(self, previous: Sequence[Tensor], gate_grads: Tensor) -> tuple[Tensor, ...]:
        return ()


def _rounding(out: Tensor) -> float:
    """Differences between a step's results that count as rounding."""
    return 100 * torch.finfo(out.dtype).eps * max(1.0, float(out.abs().nan_to_num(posinf=0).max()))


def spread(rows: int, device: torch.device) -> Tensor:
    """Indices of a few rows, from the first to the last."""
    return torch.linspace(0, rows - 1, min(PROBED_ROWS, rows), device=device).round().long()


def _check_order(function: object) -> None:
    """Refuse torch's own modules, which take x before h: with as many inputs as units they would run, but wrongly."""
    kind = type(function).__name__
    if isinstance(function, nn.RNNCellBase):
        raise TypeError(
            f"torch's {kind} takes x before h, and a cell is called as cell(h, x): give lambda h, x: cell(x, h)"
        )
    if isinstance(function, nn.RNNBase):
        raise TypeError(f"cell must be one step f(h, x) -> h, and {kind} is a layer over all steps: call it itself")


def _pull_back(out: Tensor, state: Tensor, grad: Tensor) -> Tensor:
    """`Jᵀ grad`, zero where the output does not depend on the state at all."""
    if not out.requires_grad:
        return torch.zeros_like(state)
    (result,) = torch.autograd.grad(out, state, grad, retain_graph=True, allow_unused=True)
    return torch.zeros_like(state) if result is None else result
