"""Warm starts: initial guesses of the states, given by the user or kept from the last solve of each sample."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from timeloom.known import KnownStates
from timeloom.problem import Recurrence
from timeloom.solve.kept_states import KeptStates

CHUNK_PART, MOST_EVERY = 4, 32
"""States are kept this many times in a chunk, but at least once in `MOST_EVERY` steps."""
LIMIT = 2**30
"""Default limit of the bytes that are kept."""
FIRST = 1024
"""Number of first samples that are remembered to see whether samples repeat."""


class Guess(Protocol):
    """An initial guess for solves. `slot` counts the recurrences of one call: layers, and directions within them."""

    def load(self, slot: int, problem: Recurrence) -> KnownStates | None:
        """The known states, or None if there are none."""

    def save(self, slot: int, problem: Recurrence, states: list[Tensor], chunk: int) -> None:
        """Keep the states that were found with this chunk length, one `(T + 1, B, part)` for each part of the state."""

    def refuse(self) -> None:
        """Note that a layer is faster without known states."""


class GivenStates:
    """States that the user gave, `(T, B, S)`."""

    def __init__(self, states: Tensor) -> None:
        self.states = states.detach()

    def load(self, slot: int, problem: Recurrence) -> KnownStates:
        rows = torch.arange(problem.batch, device=self.states.device)
        return KnownStates(self.states.transpose(0, 1), rows, 1, problem.initial)

    def save(self, slot: int, problem: Recurrence, states: list[Tensor], chunk: int) -> None:
        """Does nothing: given states stay as they are."""

    def refuse(self) -> None:
        """Does nothing."""


class WarmStarts:
    """The states of each training sample from its last solve, as the initial guess for the next one.

        warm = timeloom.WarmStarts()
        for index, x, target in loader:
            with warm.batch(index):
                loss = criterion(model(x), target)

    Inside the context, every GRU, LSTM and RNN of timeloom begins at the states that it had for these samples;
    alternatively, pass `guess=warm.of(index)` to one layer. If weights change little between two epochs, so do the
    states: warm-ups that begin there can be shorter, and fewer sweeps are needed. The result does not depend on the
    guess. A batch with a new sample, or with one that is longer than before, begins at the initial state as usual. So
    do all calls of a module for which known states save less than they cost: this is measured, and stated in reports
    (`timeloom.auto.beginnings`).

    dtype, device: how to keep the states; None keeps them as they are. `torch.float16` on the CPU is usually enough.
    every: interval in steps at which states are kept; None keeps a few for each chunk, which is all that chunks need.
    limit: largest number of bytes to keep; samples beyond it are not kept.
    always: begin at known states even if that does not pay. No timings are then made to decide it.
    """

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        every: int | None = None,
        limit: int = LIMIT,
        always: bool = False,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point type or None, got {dtype}")
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ValueError(f"every must be a whole number of steps, 1 or more, or None; got {every!r}")
        if limit < 0:
            raise ValueError(f"limit must be a number of bytes, 0 or more; got {limit}")
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        self.every, self.limit, self.always = every, limit, always
        self.repeats = False
        """Whether samples repeat."""
        self.full = False
        """Whether a sample was not kept, for lack of room."""
        self._first: set[Hashable] = set()
        self._kept: dict[Hashable, KeptStates] = {}
        self._places: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def of(self, samples: Tensor | Iterable[Hashable]) -> WarmBatch:
        """The guess for a batch of these samples: one key for each sequence, in the order of the batch."""
        keys = samples.tolist() if isinstance(samples, Tensor) else list(samples)
        if isinstance(samples, Tensor) and samples.dim() != 1:
            raise ValueError(f"samples must have shape (B,), one index for each sequence; got {tuple(samples.shape)}")
        if len(set(keys)) != len(keys):
            raise ValueError("samples must be distinct: one sample twice in a batch would be kept only once")
        if not self.repeats:
            self.repeats = not self._first.isdisjoint(keys)
            self._first.update(keys[: FIRST - len(self._first)])
        return WarmBatch(self, keys)

    @contextmanager
    def batch(self, samples: Tensor | Iterable[Hashable]) -> Iterator[None]:
        """A context in which timeloom's layers begin at the states that they had for these samples.

        Layers with another batch size than the number of samples run as usual, as do layers inside graphs of
        torch.compile and over ranks.
        """
        token = BATCH.set(self.of(samples))
        try:
            yield
        finally:
            BATCH.reset(token)

    def clear(self) -> None:
        """Forget all samples."""
        self._kept.clear()
        self.full = False

    def forget(self, module: Any) -> None:
        """Forget the states of all samples for one module."""
        place = self._places.get(module)
        self._kept = {key: kept for key, kept in self._kept.items() if not isinstance(key, tuple) or key[0] != place}
        self.full = False

    def __len__(self) -> int:
        """Number of samples with any states kept."""
        return len({key for kept in self._kept.values() for key in kept.samples})

    def __contains__(self, sample: Any) -> bool:
        return any(sample in kept.samples for kept in self._kept.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the kept states."""
        return sum(kept.states.numel() * kept.states.element_size() for kept in self._kept.values())

    def load(self, sample: Hashable, slot: int = 0) -> Tensor | None:
        """The states `(K, S)` kept of a sample of `of`, for one layer and direction; None if there are none."""
        kept = self._kept.get((slot,))
        return None if kept is None or sample not in kept.samples else kept.of(sample)

    def kept(self, place: Hashable) -> KeptStates | None:
        """The states kept of one recurrence of a model."""
        return self._kept.get(place)

    def save(self, place: Hashable, keys: list[Hashable], states: list[Tensor], lengths: list[int], chunk: int) -> None:
        """Keep the samples' states, except those that are not finite or too large for the dtype to keep them in."""
        with torch.inference_mode(False), torch.no_grad():  # kept tensors must serve calls outside inference mode, too
            self._save(place, keys, states, lengths, self.every or _every(chunk))

    def _save(
        self, place: Hashable, keys: list[Hashable], states: list[Tensor], lengths: list[int], every: int
    ) -> None:
        known = self._kept.get(place)
        if known is not None and every % known.every == 0:
            every = known.every  # stay at the finer interval
        found = torch.cat([part[every::every] for part in states], -1).transpose(0, 1)
        found = found.to(device=self.device, dtype=self.dtype)
        if known is None or not known.fits(found, every):
            self._kept.pop(place, None)
            known = KeptStates(found, every)
        others = self.nbytes - (known.nbytes if place in self._kept else 0)
        self.full = not known.save(keys, found, lengths, self.limit - others) or self.full
        if known.samples:
            self._kept[place] = known

    def place_of(self, module: Any) -> int:
        """The number of a module among those that were called with samples of this store."""
        return self._places.setdefault(module, len(self._places))


class WarmBatch:
    """A store's samples in the order of one batch; `place` identifies a module and its call within the batch."""

    def __init__(self, store: WarmStarts, keys: list[Hashable], place: tuple[int, ...] = ()) -> None:
        self.store, self.keys, self.place = store, keys, place
        self.refused = False
        """Whether a layer refused to begin at known states, since it is faster without."""
        self._calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self.keys)

    def permuted(self, order: Tensor) -> WarmBatch:
        """The same samples for a batch in another order."""
        return WarmBatch(self.store, [self.keys[i] for i in order.tolist()], self.place)

    def for_call_of(self, module: Any) -> WarmBatch:
        """The samples for the next call of a module; its n-th calls in different batches share their states."""
        call = self._calls[module] = self._calls.get(module, -1) + 1
        return WarmBatch(self.store, self.keys, (self.store.place_of(module), call))

    def refuse(self) -> None:
        self.refused = True

    def load(self, slot: int, problem: Recurrence) -> KnownStates | None:
        kept = self.store.kept((*self.place, slot))
        return None if kept is None else kept.load(self.keys, problem)

    def save(self, slot: int, problem: Recurrence, states: list[Tensor], chunk: int) -> None:
        self.store.save((*self.place, slot), self.keys, states, problem.ends().tolist(), chunk)


BATCH: ContextVar[WarmBatch | None] = ContextVar("timeloom's batch of samples", default=None)
"""The samples of the current batch, if the user has named them."""


@contextmanager
def no_batch() -> Iterator[None]:
    """A context in which no batch of samples is set."""
    token = BATCH.set(None)
    try:
        yield
    finally:
        BATCH.reset(token)


def _every(chunk: int) -> int:
    """The interval at which to keep states: a power of two, so that coarser ones are multiples of finer ones."""
    return min(MOST_EVERY, 1 << (max(1, chunk // CHUNK_PART).bit_length() - 1))


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
