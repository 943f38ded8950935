"""Failure of ranks: the others do not hang, but raise an error that names the rank and the cause."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

LOOK_EVERY = timedelta(seconds=0.2)
"""Interval at which a waiting rank checks whether another one has failed."""
GRACE = 2.0
"""Seconds that ranks have to report that they are alive, after one has seen a failure."""
LINGER = 1.0
"""Longest time in seconds that a rank stays alive until the others know of a failure."""


class RankError(RuntimeError):
    """A rank of the time group failed, or the ranks do not agree. Raised on every rank that is still alive."""


class Faults:
    """A record of failures that all ranks of a group can read, kept in the launcher's store."""

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store = PrefixStore(f"timeloom/{name}", store)
        self.rank, self.size = rank, size
        self._gone = False
        """Whether the process that holds the store is gone: torch logs a page at every further access."""

    def post(self, error: BaseException) -> None:
        """Report to the others that this rank stops, and why."""
        self._tell(f"rank {self.rank} stopped with {type(error).__name__}: {error}")

    def look(self) -> None:
        """Raise if another rank has failed."""
        if self._has("fault"):
            raise self._told()
        if self._has("alarm"):
            raise self.diagnose(self._try(lambda: self._store.get("alarm").decode()))

    def diagnose(self, seen: str) -> RankError:
        """Find the ranks that no longer answer, after something failed here (`seen`)."""
        self._set(f"here/{self.rank}")
        self._set("alarm", seen)
        until = time.monotonic() + GRACE
        while time.monotonic() < until and not self._gone:
            if self._has("fault"):
                return self._told()
            time.sleep(0.05)
        missing = [rank for rank in range(self.size) if not self._has(f"here/{rank}")]
        if self._gone:
            return RankError(f"the process that holds the group's store (rank 0, or the launcher) is gone; {seen}")
        names = " and ".join(f"rank {rank}" for rank in missing)
        cause = (
            f"{names} stopped answering: killed, cut off, or hanging" if missing else "a message between ranks failed"
        )
        self._tell(f"{cause}; {seen}")
        return RankError(f"{cause}; {seen}")

    def _tell(self, fault: str) -> None:
        self._set("fault", fault)
        self._linger()

    def _told(self) -> RankError:
        error = RankError(self._try(lambda: self._store.get("fault").decode()))
        self._linger()
        return error

    def _linger(self) -> None:
        """Let the others read the record before this process, which may hold the store, ends."""
        self._set(f"told/{self.rank}")
        until = time.monotonic() + LINGER
        while time.monotonic() < until and not self._has(*(f"told/{rank}" for rank in range(self.size))):
            time.sleep(0.05)

    def _set(self, key: str, value: str = "1") -> None:
        self._try(lambda: self._store.set(key, value))

    def _has(self, *keys: str) -> bool:
        return bool(self._try(lambda: self._store.check(list(keys))))

    def _try(self, ask: Any) -> Any:
        """Access the store, which may be gone with the rank that held it."""
        if self._gone:
            return ""
        try:
            return ask()
        except RuntimeError:
            self._gone = True
            return ""
