"""Sizes in generated text: numbers, or names whose values a kernel gets at run time."""

from __future__ import annotations

from collections.abc import Callable

Sizes = Callable[[int], str]
"""From a size to its text."""

NUMBERS: Sizes = str

UNITS, INPUTS = 127, 131
"""Placeholders for any number of units and any width of x: sums of a few of them decompose in only one way."""
LARGEST_FACTOR = 16
CONSTANTS = 17
"""Sizes below this are constants."""


def named(size: int) -> str:
    """A size in a step of UNITS units over x of width INPUTS, as text in terms of N and DEPTH that fits any widths."""
    if size < CONSTANTS:
        return str(size)
    for inputs in range(LARGEST_FACTOR):
        units, rest = divmod(size - inputs * INPUTS, UNITS)
        if rest == 0 and 0 <= units < LARGEST_FACTOR:
            terms = [(units, "N"), (inputs, "DEPTH")]
            text = " + ".join(f"{count} * {name}" if count > 1 else name for count, name in terms if count)
            return f"({text})" if " " in text else text
    raise ValueError(f"a size of {size} is not made of a few of {UNITS} and {INPUTS}")
