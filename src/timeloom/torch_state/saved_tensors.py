"""Hooks on what autograd saves: torch.utils.checkpoint, offloading."""

from __future__ import annotations

import torch

_top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saved_through_hooks() -> bool:
    """Whether saved tensors go through hooks.

    torch.utils.checkpoint runs a call twice, and must find the same tensors saved, whatever was learned in between.
    """
    return _top is not None and _top(True) is not None
