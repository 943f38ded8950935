"""A child process that answers each line with a line, so that a crash or hang in it takes nothing else down."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any


class Process:
    """A process that is started with the first request, and again after it has been ended."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def ask(self, request: str, seconds: float) -> str | None:
        """The answer, or None if the process has ended; raises queue.Empty if none comes in time."""
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(request + "\n")
        process.stdin.flush()
        return self._answers.get(timeout=seconds) or None

    @property
    def running(self) -> bool:
        return self._process is not None

    def status(self) -> int | None:
        """The process's exit status, once it has ended."""
        return self._process.wait() if self._process else None

    def _start(self) -> subprocess.Popen[str]:
        pipe: Any = subprocess.PIPE
        process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True, env=surroundings())
        self._process, answers = process, queue.Queue[str]()
        self._answers = answers

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    answers.put(line)
            answers.put("")  # it has ended

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        return process

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None or process.stdin is None or self._reader is None:
            return
        process.kill()
        process.wait()
        self._reader.join()
        with suppress(BrokenPipeError):  # a request that was never read
            process.stdin.close()


def surroundings() -> dict[str, str]:
    """The environment for a process with the same import path as this one, whatever the working folder."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def serve(answer: Callable[[str], str]) -> None:
    """Run in such a process: answer every line of its input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that what libraries print is not taken for an answer
    for request in sys.stdin:
        print(answer(request), file=answers, flush=True)
