"""Waiting for collectives and messages, in intervals short enough to detect a rank that fails."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from timeloom.distributed.faults import LOOK_EVERY, Faults


def done(work: Any, faults: Faults) -> bool:
    """Wait for a collective for a while; returns whether it has finished, and raises if it failed."""
    try:
        work.wait(LOOK_EVERY)
        return True
    except RuntimeError as error:
        if not work.is_completed():
            return False  # it takes longer
        seen = error
    try:
        work.wait()  # it may have finished just after the first wait timed out
        return True
    except RuntimeError as error:
        raise faults.diagnose(first_line(error)) from seen


class Blocking:
    """Messages between ranks with the interface of a collective's work.

    A timed-out wait for a message would break gloo's connections, so another thread waits.
    """

    def __init__(self, works: list[Any], timeout: timedelta) -> None:
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, args=(works, timeout), daemon=True)
        self._thread.start()

    def _run(self, works: list[Any], timeout: timedelta) -> None:
        try:
            for work in works:
                work.wait(timeout)
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta | None = None) -> None:
        self._thread.join(None if timeout is None else timeout.total_seconds())
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise RuntimeError("it takes longer")


class Queued:
    """Messages on a device's stream, with the interface of a collective's work."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def first_line(error: RuntimeError) -> str:
    return str(error).strip().split("\n")[0][:200]
