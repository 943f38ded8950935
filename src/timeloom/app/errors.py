"""The errors that users can mend: what was given, what was expected, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

MOST_NAMED = 3
"""Files that are named of those with the same problem as another."""
MOST_TOLD = 30
"""Problems that a message lists; more would push the first ones off the screen."""
_FILE = re.compile(r"[^\s:,']+\.(?:csv|npy|parquet|ts)\b", re.IGNORECASE)
_PLACE = re.compile(r"(?<=step |line )\d+")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file, an option or a checkpoint."""

    text: str
    kind: str = ""
    """What the same problem of other files has in common with it; by default the text without its file and place."""
    file: str = ""

    @property
    def shared(self) -> str:
        """The same for all problems that are alike."""
        text = self.text.replace(self.file, "#") if self.file else self.text
        return self.kind or _PLACE.sub("#", _FILE.sub("#", text))

    @property
    def name(self) -> str:
        """The file, or the line where one file holds many series; empty where the text has neither."""
        found = _FILE.findall(self.text)
        file = self.file or (found[-1] if found else "")
        line = re.search(rf"{re.escape(file)}, (line \d+)", self.text) if file.endswith(".ts") else None
        return line[1] if line else file.rpartition("/")[2]


class InputError(ValueError):
    """A file, an option or a checkpoint that cannot be used; the message is for the user, one line a problem.

    kind: what the same problem of other files has in common with it, where the message has an example of its own.
    """

    def __init__(self, message: str, kind: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (Problem(message, kind),)


class Problems:
    """Gathers what is wrong with many files, to tell all of it at once, and what they share once."""

    def __init__(self, found: Sequence[Problem] = ()) -> None:
        self.found = list(found)

    def add(self, text: str) -> None:
        self.found.append(Problem(text))

    def add_of(self, problem: Problem | None, source: str) -> None:
        """What is wrong with a part of the source, if anything is."""
        if problem is not None:
            self.found.append(replace(problem, text=f"{source}: {problem.text}"))

    @contextmanager
    def noted(self, file: str = "") -> Iterator[None]:
        """An InputError inside is kept for later; `file`: what was being read."""
        try:
            yield
        except InputError as error:
            self.found += [replace(problem, file=problem.file or file) for problem in error.problems]

    def tell(self, source: str) -> None:
        """Raise what was found, if anything was."""
        if not self.found:
            return
        told = _alike_once(list(dict.fromkeys(self.found)))
        if len(told) == 1:
            raise InputError(told[0], problems=self.found)
        more = [f"… and {len(told) - MOST_TOLD} more"] if len(told) > MOST_TOLD else []
        lines = [f"  {line}" for line in [*told[:MOST_TOLD], *more]]
        raise InputError("\n".join([f"{source} has {len(told)} problems:", *lines]), problems=self.found)


def _alike_once(problems: Sequence[Problem]) -> list[str]:
    """The same problem of many files once: that of the first file, and the names of some others."""
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(problem.shared, []).append(problem)
    told = []
    for first, *others in alike.values():
        names = list(dict.fromkeys(other.name for other in others if other.name))
        named = ", ".join(names[:MOST_NAMED]) + (", …" if len(names) > MOST_NAMED else "")
        told.append(first.text + (f" (and {len(others)} more alike{f': {named}' if named else ''})" if others else ""))
    return told
