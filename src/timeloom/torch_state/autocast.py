"""Autocast, kept out of a solve: how precise it is, is decided before."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Inside, autocast is off on this kind of device; where it is off already, nothing is switched."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else nullcontext()


def autocast_on(device: torch.device) -> bool:
    """Whether it is on for this kind of device, which may know of none."""
    kind = device.type
    return (kind == "cpu" or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)
