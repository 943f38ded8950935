"""Batches made ready by a second thread while a training step runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """What `make(step)` gives, without the wait where `begin` was called for that step before."""

    def __init__(self, make: Callable[[int], Item]) -> None:
        self._make = make
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._begun: tuple[int, Future[Item]] | None = None

    def begin(self, step: int) -> None:
        """Start on the item of a step and return at once."""
        self._begun = (step, self._pool.submit(self._make, step))

    def take(self, step: int) -> Item:
        """The item of a step: the one that was begun, or a new one."""
        begun, self._begun = self._begun, None
        return begun[1].result() if begun is not None and begun[0] == step else self._make(step)

    def close(self) -> None:
        """Drop what was begun."""
        self._pool.shutdown(cancel_futures=True)
