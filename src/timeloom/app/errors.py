"""The errors that users can mend: what was given, what was expected, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

MOST_NAMED = 3
"""Files that are named of those with the same problem as another."""
MOST_TOLD = 30
"""Problems that a message lists; more would push the first ones off the screen."""
_FILE = re.compile(r"[^\s:,']+\.(?:csv|npy|parquet)\b")
_PLACE = re.compile(r"(?<=step |line )\d+")


class InputError(ValueError):
    """A file, an option or a checkpoint that cannot be used; the message is for the user, one line a problem."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (message,)


class Problems:
    """Gathers what is wrong with many files, to tell all of it at once."""

    def __init__(self, found: tuple[str, ...] = ()) -> None:
        self.found = list(found)

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
        told = _alike_once(found)
        more = [f"… and {len(told) - MOST_TOLD} more"] if len(told) > MOST_TOLD else []
        lines = [f"  {line}" for line in [*told[:MOST_TOLD], *more]]
        raise InputError("\n".join([f"{source} has {len(found)} problems:", *lines]), tuple(found))


def _alike_once(problems: list[str]) -> list[str]:
    """The same problem of many files once, with the names of some of them."""
    alike: dict[str, list[str]] = {}
    for text in problems:
        alike.setdefault(_PLACE.sub("#", _FILE.sub("#", text)), []).append(text)
    told = []
    for first, *others in alike.values():
        files = [found[-1].rpartition("/")[2] for text in others if (found := _FILE.findall(text))]
        named = ", ".join(files[:MOST_NAMED]) + (", …" if len(files) > MOST_NAMED else "")
        told += [f"{first} (and {len(others)} more alike: {named})"] if files else [first, *others]
    return told
