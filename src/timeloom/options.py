"""Checks of options: an invalid value raises an error that says what was given and what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse anything but one of these strings."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse anything but a whole number from `least` up, or None."""
    if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least):
        raise ValueError(f"{name} must be a whole number ≥ {least} or None, got {value!r}")


def check_number(name: str, value: object, below: float = math.inf, optional: bool = True) -> None:
    """Refuse anything but a number with 0 < value < `below`, or None if `optional`."""
    if value is None and optional:
        return
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < below:
        wanted = "a positive number" if math.isinf(below) else f"a number between 0 and {below:g}"
        raise ValueError(f"{name} must be {wanted}{' or None' * optional}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the closest known name, or nothing if none is close."""
    from difflib import get_close_matches  # needed only for error messages

    found = get_close_matches(given.lower(), list(known), n=1) if isinstance(given, str) else []
    return f"; did you mean {found[0]!r}?" if found else ""
