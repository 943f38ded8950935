"""The errors that users can mend: what was given, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MOST_TOLD = 30
"""Problems that a message lists; more would push the first ones off the screen."""


class InputError(ValueError):
    """A file, an option or a checkpoint that cannot be used; the message is for the user, one line a problem."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (message,)


class Problems:
    """Gathers what is wrong with many files, to tell all of it at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, text: str) -> None:
        self.found.append(text)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """An InputError inside is kept for later."""
        try:
            yield
        except InputError as error:
            self.found += error.problems

    def tell(self, source: str) -> None:
        """Raise what was found, if anything was."""
        found = list(dict.fromkeys(self.found))
        if not found:
            return
        if len(found) == 1:
            raise InputError(found[0])
        more = [f"… and {len(found) - MOST_TOLD} more"] if len(found) > MOST_TOLD else []
        lines = [f"  {line}" for line in [*found[:MOST_TOLD], *more]]
        raise InputError("\n".join([f"{source} has {len(found)} problems:", *lines]), tuple(found))
