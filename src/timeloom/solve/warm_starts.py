"""Warm starts: states to begin the iterations with, given by the user or kept from the last solve of each sample."""

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
"""States are kept at every such part of a chunk, and at every so manieth step at least."""
LIMIT = 2**30
"""Bytes that are kept at most, unless told otherwise."""
FIRST = 1024
"""Samples that came first, by which it is seen whether any come back."""


class Guess(Protocol):
    """Where a solve may begin. `slot` counts the recurrences of one call: layers, and directions within them."""

    def load(self, slot: int, problem: Recurrence) -> KnownStates | None:
        """What is known of the states, or None where that is nothing."""

    def save(self, slot: int, problem: Recurrence, states: list[Tensor], chunk: int) -> None:
        """Take in the states that were found in chunks: one `(T + 1, B, part)` for each part of the state."""

    def refuse(self) -> None:
        """Take in that a layer gains more without."""


class GivenStates:
    """States that the user gave, `(T, B, S)`."""

    def __init__(self, states: Tensor) -> None:
        self.states = states.detach()

    def load(self, slot: int, problem: Recurrence) -> KnownStates:
        rows = torch.arange(problem.batch, device=self.states.device)
        return KnownStates(self.states.transpose(0, 1), rows, 1, problem.initial)

    def save(self, slot: int, problem: Recurrence, states: list[Tensor], chunk: int) -> None:
        """A guess is not changed by what comes of it."""

    def refuse(self) -> None:
        """The same."""


class WarmStarts:
    """The states that each training sample had when it was last solved, as the guess for the next time.

        warm = timeloom.WarmStarts()
        for index, x, target in loader:
            with warm.batch(index):
                loss = criterion(model(x), target)

    Inside, every GRU, LSTM and RNN of timeloom that is called begins at the states that it had for these samples; or
    give one layer `guess=warm.of(index)`. Where weights move little between two epochs, so do the states: warm-ups
    that begin there can be shorter, and fewer sweeps are needed. What is found does not depend on it. A batch with a
    sample not seen before, or longer than it was, begins at the initial state as usual. So do all calls of a module
    for which known states save less than they cost: it is tried, and reports tell (`timeloom.auto.beginnings`).

    dtype, device: how to keep the states; None keeps them as they are. `torch.float16` on the CPU is usually enough.
    every: keep the state after every so many steps; None: a few for each chunk, which is all that chunks need.
    limit: bytes to keep, at most; samples beyond it are not kept.
    always: begin at known states whether that pays or not. Timings then decide nothing.
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
        """Whether samples come back."""
        self.full = False
        """Whether there was no room for a sample."""
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
        """Inside, timeloom's layers begin at what they had for these samples. Layers whose batch is of another size
        than there are samples run as usual, and so do those inside graphs of torch.compile and over ranks.
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
        """Forget what one module had of all samples."""
        place = self._places.get(module)
        self._kept = {key: kept for key, kept in self._kept.items() if not isinstance(key, tuple) or key[0] != place}
        self.full = False

    def __len__(self) -> int:
        """Samples that something is kept of."""
        return len({key for kept in self._kept.values() for key in kept.samples})

    def __contains__(self, sample: Any) -> bool:
        return any(sample in kept.samples for kept in self._kept.values())

    @property
    def nbytes(self) -> int:
        """Memory that the kept states take."""
        return sum(kept.states.numel() * kept.states.element_size() for kept in self._kept.values())

    def load(self, sample: Hashable, slot: int = 0) -> Tensor | None:
        """What is kept of a sample of `of`: states `(K, S)` of one layer and direction; None where that is nothing."""
        kept = self._kept.get((slot,))
        return None if kept is None or sample not in kept.samples else kept.of(sample)

    def kept(self, place: Hashable) -> KeptStates | None:
        """What is kept of one recurrence of a model."""
        return self._kept.get(place)

    def save(self, place: Hashable, keys: list[Hashable], states: list[Tensor], lengths: list[int], chunk: int) -> None:
        """Keep the samples' states; not those that are not finite, or too large for the dtype they are kept in."""
        with torch.inference_mode(False), torch.no_grad():  # what is kept must serve calls in any mode
            self._save(place, keys, states, lengths, self.every or _every(chunk))

    def _save(
        self, place: Hashable, keys: list[Hashable], states: list[Tensor], lengths: list[int], every: int
    ) -> None:
        known = self._kept.get(place)
        if known is not None and every % known.every == 0:
            every = known.every  # as fine as it was asked for before
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
        """A number for each module that was called with samples of this store."""
        return self._places.setdefault(module, len(self._places))


class WarmBatch:
    """A store's samples in the order of one batch; `place`: which call of which module it is for."""

    def __init__(self, store: WarmStarts, keys: list[Hashable], place: tuple[int, ...] = ()) -> None:
        self.store, self.keys, self.place = store, keys, place
        self.refused = False
        """Whether a layer would not begin at known states, since it gains more without."""
        self._calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self.keys)

    def permuted(self, order: Tensor) -> WarmBatch:
        """For a batch whose sequences stand in another order."""
        return WarmBatch(self.store, [self.keys[i] for i in order.tolist()], self.place)

    def for_call_of(self, module: Any) -> WarmBatch:
        """For the next call of a module: the first one of a batch begins where the first one of another batch did."""
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
"""The samples that calls are of, where the user has said so."""


@contextmanager
def no_batch() -> Iterator[None]:
    """Inside, it is as if nobody had said which samples calls are of."""
    token = BATCH.set(None)
    try:
        yield
    finally:
        BATCH.reset(token)


def _every(chunk: int) -> int:
    """A power of two, so that a coarser one is a multiple of a finer one."""
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
