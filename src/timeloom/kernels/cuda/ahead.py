"""Compiles in the background what will be needed soon, while the first kernels of a layer are compiled and run.

Threads live only as long as there is work. Once the program ends they begin no more of it, but what they are compiling
then is waited for, a second or two.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

MOST_THREADS = 8

Build = Callable[[], bytes]


def threads_to_spare() -> int:
    """Threads that may compile: all cores of this process but one, shared with the other ranks on its machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(MOST_THREADS, max((cores - 1) // max(int(ranks) if ranks.isdigit() else 1, 1), 1))


class Ahead:
    """Builds under way and done, by their keys; None for those that were taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Future[bytes] | None] = {}
        self._waiting: deque[tuple[Build, Future[bytes]]] = deque()
        self._threads = 0

    def begin(self, key: str, build: Build) -> None:
        """Run `build` in the background, unless this key is known or was; not at all where no thread can start."""
        with self._lock:
            if key in self._known:
                return
            future: Future[bytes] = Future()
            self._known[key] = future
            self._waiting.append((build, future))
            if self._threads >= threads_to_spare():
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name="timeloom-compile").start()
        except RuntimeError:  # a limit of processes, or the program ends: who needs it builds it
            with self._lock:
                self._threads -= 1

    def take(self, key: str) -> bytes | None:
        """What was built for this key, waited for if it is under way; None if it was not begun, or failed."""
        with self._lock:
            future = self._known.get(key)
            if future is not None:
                self._known[key] = None
        if future is None or future.cancel() or future.exception() is not None:
            return None
        return future.result()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or not threading.main_thread().is_alive():
                    self._threads -= 1
                    return
                build, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(build())
                except BaseException as error:  # who needs it builds it again, and is told
                    future.set_exception(error)


AHEAD = Ahead()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=AHEAD.__init__)  # type: ignore[misc]  # threads stay behind in the parent
