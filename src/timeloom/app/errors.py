"""The error that users can mend: what was given, what was expected, what to do."""

from __future__ import annotations


class InputError(ValueError):
    """A file, an option or a checkpoint that cannot be used; the message is one line for the user."""
