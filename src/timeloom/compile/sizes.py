"""Sizes in generated text: numbers, or names that a kernel is told the values of as it runs."""

from __future__ import annotations

from collections.abc import Callable

Sizes = Callable[[int], str]
"""From a size to what stands for it in a text."""

NUMBERS: Sizes = str

UNITS, INPUTS = 127, 131
"""Sizes that stand for any number of units, and for any width of x: a sum of a few of them is one such sum alone."""
LARGEST_FACTOR = 16
CONSTANTS = 17
"""Sizes below this are themselves."""


def named(size: int) -> str:
    """A size of a step of UNITS units over x of INPUTS numbers, as a text that serves any: made of N and DEPTH."""
    if size < CONSTANTS:
        return str(size)
    for inputs in range(LARGEST_FACTOR):
        units, rest = divmod(size - inputs * INPUTS, UNITS)
        if rest == 0 and 0 <= units < LARGEST_FACTOR:
            terms = [(units, "N"), (inputs, "DEPTH")]
            text = " + ".join(f"{count} * {name}" if count > 1 else name for count, name in terms if count)
            return f"({text})" if " " in text else text
    raise ValueError(f"a size of {size} is not made of a few of {UNITS} and {INPUTS}")
