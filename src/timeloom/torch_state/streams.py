"""What is under way on a GPU's stream."""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    """Whether what is done on this device goes into a CUDA graph, so that no number can be read."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device.index):
        return torch.cuda.is_current_stream_capturing()
