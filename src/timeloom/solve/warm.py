"""Warm starts: states to begin the iterations with, given by the user or kept from the last solve of each sample."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from timeloom.problem import Recurrence


class Guess(Protocol):
    """Where a solve may begin. `slot` counts the recurrences of one call: layers, and directions within them."""

    def load(self, slot: int, problem: Recurrence) -> Tensor | None:
        """States after all steps, `(T, B, S)`, or None where nothing is known."""

    def save(self, slot: int, problem: Recurrence, states: list[Tensor]) -> None:
        """Take in the states that were found: one `(T + 1, B, part)` for each part of the state."""


class GivenStates:
    """States that the user gave, `(T, B, S)`."""

    def __init__(self, states: Tensor) -> None:
        self.states = states.detach()

    def load(self, slot: int, problem: Recurrence) -> Tensor:
        return self.states.to(problem.initial)

    def save(self, slot: int, problem: Recurrence, states: list[Tensor]) -> None:
        """A guess is not changed by what comes of it."""


class WarmStarts:
    """The states that each training sample had when it was last solved, as the guess for the next time.

        store = timeloom.WarmStarts()
        for index, x, target in loader:
            y, h = gru(x, guess=store.of(index))

    Weights move little between two epochs, and so do the states: iterations that begin there need fewer sweeps. What is
    found does not depend on it. A sample not seen before, or longer than it was, begins at the initial state as usual.

    dtype, device: how to keep the states; None keeps them as they are. `torch.float16` on the CPU is usually enough.
    """

    def __init__(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point type or None, got {dtype}")
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        self._states: dict[tuple[Hashable, int], Tensor] = {}

    def of(self, samples: Tensor | Iterable[Hashable]) -> WarmBatch:
        """The guess for a batch of these samples: one key for each sequence, in the order of the batch."""
        keys = samples.tolist() if isinstance(samples, Tensor) else list(samples)
        if isinstance(samples, Tensor) and samples.dim() != 1:
            raise ValueError(f"samples must have shape (B,), one index for each sequence; got {tuple(samples.shape)}")
        if len(set(keys)) != len(keys):
            raise ValueError("samples must be distinct: one sample twice in a batch would be kept only once")
        return WarmBatch(self, keys)

    def clear(self) -> None:
        """Forget all samples."""
        self._states.clear()

    def __len__(self) -> int:
        """Samples that something is kept of."""
        return len({key for key, _ in self._states})

    def __contains__(self, sample: Any) -> bool:
        return any(key == sample for key, _ in self._states)

    @property
    def nbytes(self) -> int:
        """Memory that the kept states take."""
        return sum(states.numel() * states.element_size() for states in self._states.values())

    def load(self, key: Hashable, slot: int) -> Tensor | None:
        return self._states.get((key, slot))

    def save(self, key: Hashable, slot: int, states: Tensor) -> None:
        """Keep a sample's states; not those that are not finite, or too large for the dtype they are kept in."""
        kept = states.to(device=self.device, dtype=self.dtype, copy=True)
        if bool(kept.isfinite().all()):
            self._states[key, slot] = kept


class WarmBatch:
    """A store's samples in the order of one batch."""

    def __init__(self, store: WarmStarts, keys: list[Hashable]) -> None:
        self.store, self.keys = store, keys

    def __len__(self) -> int:
        return len(self.keys)

    def permuted(self, order: Tensor) -> WarmBatch:
        """For a batch whose sequences stand in another order."""
        return WarmBatch(self.store, [self.keys[i] for i in order.tolist()])

    def load(self, slot: int, problem: Recurrence) -> Tensor | None:
        initial, steps = problem.initial, problem.steps
        kept = [self.store.load(key, slot) for key in self.keys]
        kept = [None if k is None or k.shape[1] != initial.shape[1] else k[:steps] for k in kept]
        if all(k is None for k in kept):
            return None
        guess = initial.expand(steps, *initial.shape).clone()
        for sequence, states in enumerate(kept):
            if states is not None:
                guess[: len(states), sequence] = states.to(guess)
        return guess

    def save(self, slot: int, problem: Recurrence, states: list[Tensor]) -> None:
        found = torch.cat([part[1:] for part in states], -1).detach()
        for sequence, (key, length) in enumerate(zip(self.keys, problem.ends().tolist(), strict=True)):
            self.store.save(key, slot, found[:length, sequence])


def check_batch(guess: WarmBatch, batch: int) -> None:
    if len(guess) != batch:
        raise ValueError(f"guess is for {len(guess)} samples, the batch has {batch} sequences: give one key for each")


def check_states(given: Any, shapes: tuple[tuple[int, ...], ...], is_tuple: bool) -> tuple[Tensor, ...]:
    """The parts of guessed states, or an error that says what was expected."""
    parts = given if isinstance(given, tuple) else (given,)
    expected = ", ".join(map(str, shapes))
    if isinstance(given, tuple) != is_tuple or not all(isinstance(part, Tensor) for part in parts):
        kind = f"a tuple of tensors of shapes {expected}" if is_tuple else f"a tensor of shape {expected}"
        raise TypeError(f"guess must be {kind}, or a batch of timeloom.WarmStarts; got {type(given).__name__}")
    shown = ", ".join(str(tuple(part.shape)) for part in parts)
    if tuple(tuple(part.shape) for part in parts) != shapes:
        raise ValueError(f"guess has shape {shown}, expected {expected}: the states after every step")
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ValueError("guess holds values that are not finite")
    return parts
