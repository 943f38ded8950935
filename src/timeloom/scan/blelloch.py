"""The linear recurrence by Blelloch's scan, in the form that back-propagation by scan (BPPSA) gave it.

Elements are pairs `(a, b)` that stand for `h → a h + b`; composing two is not commutative. The scan is exclusive: what
it finds is the state *before* each element, so the down-sweep carries states, never matrices:

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

from timeloom.scan import native
from timeloom.scan.elements import Structure, apply, compose


def scan(a: Tensor, b: Tensor, h0: Tensor, structure: Structure, levels: int | None = None) -> Tensor:
    """Same as `timeloom.scan.reference.scan`; `levels` None goes up to one root, 0 is the serial scan."""
    steps = len(b)
    if steps == 0:
        return b
    last_a, last_b = a[-1], b[-1]
    tree: list[tuple[Tensor, Tensor]] = []
    while len(b) > 1 and (levels is None or len(tree) < levels):
        tree.append((a, b))
        a, b = _pair(a, b, structure)
    before = h0.unsqueeze(0)
    if len(b) > 1:
        before = torch.cat([before, native.serial(a[:-1], b[:-1], h0, structure)])
    for a, b in reversed(tree):
        pairs = len(b) // 2
        children = torch.empty_like(b)
        children[0::2] = before
        left = slice(0, 2 * pairs, 2)
        children[1::2] = apply(a[left], before[:pairs], structure) + b[left]
        before = children
    last = apply(last_a, before[-1], structure) + last_b
    return torch.cat([before[1:], last.unsqueeze(0)])


def _pair(a: Tensor, b: Tensor, structure: Structure) -> tuple[Tensor, Tensor]:
    """One level up: neighbours composed; the last of an odd number goes up alone."""
    whole = len(b) // 2 * 2
    left, right = slice(0, whole, 2), slice(1, whole, 2)
    if whole == 2 and len(b) == 2:  # the parent is the root, and nothing comes behind it
        return a[:1], b[:1]
    products = compose(a[right], a[left], structure)
    sources = apply(a[right], b[left], structure) + b[right]
    return torch.cat([products, a[whole:]]), torch.cat([sources, b[whole:]])
