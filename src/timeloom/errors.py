"""The error that users can mend: what was given, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Iterable


class InputError(ValueError):
    """A file, an option or a checkpoint that cannot be used; the message is one line for the user."""


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one nearest to it, or nothing where none is near."""
    from difflib import get_close_matches  # needed only when something went wrong

    found = get_close_matches(given.lower(), list(known), n=1) if isinstance(given, str) else []
    return f"; did you mean {found[0]!r}?" if found else ""
