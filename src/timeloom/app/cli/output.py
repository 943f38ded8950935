"""Standard output that may end before the command: a full disk behind `> log`, or `| head` that has read enough."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

READER_LEFT = 141
"""Exit status of a command whose reader went away, as shells have it."""


class OutputLostError(Exception):
    """Standard output cannot be written to any more."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"cannot write to standard output: {cause.strerror or cause}")
        self.reader_left = isinstance(cause, BrokenPipeError)


class Output:
    """A stream in the place of standard output, the loss of which is an OutputLostError, unless the work goes on."""

    goes_on = False
    """Whether what is said after the loss is just dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.lost: OutputLostError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._noticing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._noticing():
            self._stream.flush()

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.lost is not None and self.goes_on:
                return
            self.lost = OutputLostError(error)
            self._drop_what_is_left()
            if not self.goes_on:
                raise self.lost from None
            tell(f"{self.lost}. The training goes on without it, and writes its files (Ctrl-C stops it)")

    def _drop_what_is_left(self) -> None:
        """Python writes it once more as it ends, and would complain."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def spoken() -> Iterator[Output]:
    """Inside, the loss of standard output is noticed."""
    before, output = sys.stdout, Output(sys.stdout)
    if before is None:  # closed before the start: nothing is said
        yield output
        return
    sys.stdout = output
    try:
        yield output
    finally:
        sys.stdout = before
        output.flush()


def go_on_without() -> None:
    """From now on the work is worth something even if nobody can read of it."""
    if isinstance(sys.stdout, Output):
        sys.stdout.goes_on = True


def tell(text: str) -> None:
    """A line on standard error, if that can be written to."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
