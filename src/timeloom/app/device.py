"""The device that a user names."""

from __future__ import annotations

import torch

from timeloom.app.errors import InputError


def device_of(name: str, option: str = "--device ") -> torch.device:
    """The device that was asked for, if it is there; `auto` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"{option}{name}: {str(error).splitlines()[0]}; `timeloom doctor` lists what there is"
        ) from None
    return device
