"""Autocast, kept out of a solve: how precise it is, is decided before."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Inside, autocast is off on this kind of device; where it is off already, nothing is switched."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
