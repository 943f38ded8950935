"""All prefixes under an associative composition, in a tree of log T levels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Elements = tuple[Tensor, ...]
"""One tensor for each component of the elements, time first."""


def associative_scan(combine: Callable[[Elements, Elements], Elements], elements: Elements) -> Elements:
    """`elements[0] ∘ … ∘ elements[t]` for all t; `combine(earlier, later)` composes many pairs at once.

    Pairs are composed, their prefixes found recursively, and the prefixes in between follow from those by one more
    composition: fewer than 2 T compositions in all.
    """
    steps = len(elements[0])
    if steps < 2:
        return elements
    whole = steps // 2 * 2
    pairs = combine(_at(elements, slice(0, whole, 2)), _at(elements, slice(1, whole, 2)))
    odd = associative_scan(combine, pairs)
    between = _at(elements, slice(2, None, 2))
    even = combine(_at(odd, slice(len(between[0]))), between) if len(between[0]) else between
    results = []
    for first, at_even, at_odd in zip(elements, even, odd, strict=True):
        result = torch.empty_like(first)
        result[0], result[2::2], result[1::2] = first[0], at_even, at_odd
        results.append(result)
    return tuple(results)


def _at(elements: Elements, which: slice) -> Elements:
    return tuple(component[which] for component in elements)
