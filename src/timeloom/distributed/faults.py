"""What a rank does when another one fails: no hang, and an error that names the rank and the cause."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

LOOK_EVERY = timedelta(seconds=0.2)
"""How often a rank that waits for others looks whether one of them has failed."""
GRACE = 2.0
"""Seconds that ranks have to say that they are still there, once one has seen a failure."""


class RankError(RuntimeError):
    """A rank of the time group failed, or the ranks do not agree. It is raised on every rank that is still there."""


class Faults:
    """A board that all ranks of a group can read: who failed and why, kept in the launcher's store."""

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store = PrefixStore(f"timeloom/{name}", store)
        self.rank, self.size = rank, size

    def post(self, error: BaseException) -> None:
        """Tell the others that this rank stops, and why."""
        words = f"{type(error).__name__}: {error}"
        self._try(lambda: self._store.set("fault", f"rank {self.rank} stopped with {words}"))

    def look(self) -> None:
        """Raise if another rank has failed."""
        if self._has("fault"):
            raise RankError(self._try(lambda: self._store.get("fault").decode()))
        if self._has("alarm"):
            raise self.diagnose("another rank saw a failure")

    def diagnose(self, seen: str) -> RankError:
        """Something failed here (`seen`): find out who does not answer any more."""
        self._try(lambda: self._store.set(f"here/{self.rank}", "1"))
        self._try(lambda: self._store.set("alarm", "1"))
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            if self._has("fault"):
                return RankError(self._try(lambda: self._store.get("fault").decode()))
            time.sleep(0.05)
        try:
            missing = [rank for rank in range(self.size) if not self._store.check([f"here/{rank}"])]
        except RuntimeError:
            return RankError(f"the process that holds the group's store (rank 0, or the launcher) is gone; {seen}")
        if not missing:
            return RankError(f"all ranks are there, but a message between them failed: {seen}")
        names = " and ".join(f"rank {rank}" for rank in missing)
        return RankError(f"{names} stopped answering: killed, cut off, or hanging; {seen}")

    def _has(self, key: str) -> bool:
        return bool(self._try(lambda: self._store.check([key])))

    @staticmethod
    def _try(ask: Any) -> Any:
        """The store may be gone with the rank that held it."""
        try:
            return ask()
        except RuntimeError:
            return ""
