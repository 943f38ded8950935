"""Autocast, kept out of a solve, whose precision is decided before."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Context in which autocast is off for this kind of device; does nothing if it is off already."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else nullcontext()


def autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for this kind of device, which may not support it."""
    kind = device.type
    return (kind == "cpu" or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)
