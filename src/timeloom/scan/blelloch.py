"""The linear recurrence by Blelloch's scan, in the form that back-propagation by scan (BPPSA) gave it.

Elements are pairs `(a, b)` that stand for `h → a h + b`; composing two is not commutative. The scan is exclusive: it
computes the state *before* each element, so the down-sweep carries states, never matrices:

    up:    (a, b) of a node = right ∘ left = (a_r a_l, a_r b_l + b_r)          a product of matrices for each pair
    roots: the states before all roots, one after the other                    one matrix-vector product for each root
    down:  the left child starts where its parent does, the right child        one matrix-vector product for each pair
           where the left one ends: `a_l h + b_l`

With the full number of levels one root is left, and it is never multiplied; no identity is ever formed. With fewer
levels (hybrid truncation) the products of matrices stop where they no longer pay, and the roots are run in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from timeloom.scan import cpu
from timeloom.scan.elements import Structure, apply, compose


def scan(
    a: Tensor, b: Tensor, h0: Tensor, structure: Structure, levels: int | None = None, reverse: bool = False
) -> Tensor:
    """Same as `timeloom.scan.reference.scan`; `levels` None goes up to one root, 0 is the serial scan.

    `reverse` runs from the last step to the first; then the earlier of two neighbours is the right one.
    """
    steps = len(b)
    if steps == 0:
        return b
    tree: list[tuple[Tensor, Tensor]] = [(a, b)]
    while len(b) > 1 and (levels is None or len(tree) <= levels):
        a, b = _pair(a, b, structure, reverse)
        tree.append((a, b))
    before = _before_roots(*tree.pop(), h0, structure, reverse)
    for a, b in reversed(tree):
        earlier, later, alone = _neighbours(len(b), reverse)
        parents = before[len(before) - len(b) // 2 :] if reverse else before[: len(b) // 2]
        children = torch.empty_like(b)
        children[alone] = before[:1] if reverse else before[-1:]
        children[earlier] = parents
        children[later] = apply(a[earlier], parents, structure) + b[earlier]
        before = children
    a, b = tree[0] if tree else (a, b)
    last = 0 if reverse else -1
    behind = (apply(a[last], before[last], structure) + b[last]).unsqueeze(0)
    return torch.cat([behind, before[:-1]] if reverse else [before[1:], behind])


def _neighbours(count: int, reverse: bool) -> tuple[slice, slice, slice]:
    """Slices of the earlier and of the later elements of all pairs, in scan order, and of an unpaired last one."""
    if reverse:
        odd = count % 2
        return slice(odd + 1, None, 2), slice(odd, None, 2), slice(0, odd)
    whole = count // 2 * 2
    return slice(0, whole, 2), slice(1, whole, 2), slice(whole, None)


def _pair(a: Tensor, b: Tensor, structure: Structure, reverse: bool) -> tuple[Tensor, Tensor]:
    """One level up: neighbours composed; the last of an odd number goes up alone."""
    if len(b) == 2:  # the parent is the root, and nothing comes behind it
        return a[:1], b[:1]
    earlier, later, alone = _neighbours(len(b), reverse)
    products = compose(a[later], a[earlier], structure)
    sources = apply(a[later], b[earlier], structure) + b[later]
    if len(b) % 2 == 0:
        return products, sources
    order = slice(None, None, -1 if reverse else 1)
    return torch.cat([products, a[alone]][order]), torch.cat([sources, b[alone]][order])


def _before_roots(a: Tensor, b: Tensor, h0: Tensor, structure: Structure, reverse: bool) -> Tensor:
    """The states before all roots, one after the other."""
    start = h0.unsqueeze(0)
    if len(b) == 1:
        return start
    if reverse:
        return torch.cat([cpu.serial(a[1:], b[1:], h0, structure, True), start])
    return torch.cat([start, cpu.serial(a[:-1], b[:-1], h0, structure)])
