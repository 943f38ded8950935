"""Options among the words of a command line, before they are parsed."""

from __future__ import annotations

from collections.abc import Sequence

from timeloom.app.errors import InputError
from timeloom.app.train.config import at_least


def value_of(option: str, words: Sequence[str]) -> str | None:
    """What is given for an option, None where it is not."""
    for index, word in enumerate(words):
        if word.startswith(option + "="):
            return word.partition("=")[2]
        if word == option:
            if index + 1 == len(words):
                raise InputError(f"{option} needs a value")
            return words[index + 1]
    return None


def without(option: str, words: Sequence[str]) -> list[str]:
    """The words without an option and its value."""
    each, left = iter(words), []
    for word in each:
        if word == option:
            next(each, None)
        elif not word.startswith(option + "="):
            left.append(word)
    return left


def whole_number(option: str, text: str, least: int) -> int:
    """The value of an option that counts something."""
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{option} must be a whole number, got {text!r}") from None
    at_least(option.removeprefix("--"), value, least)
    return value
