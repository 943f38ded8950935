"""What is under way on a GPU's stream."""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    """Whether what is done on this device goes into a CUDA graph, so that no number can be read."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device.index):
        return torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The current stream of a GPU, as a number."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def may_replay(device: torch.device) -> bool:
    """Whether a CUDA graph may be launched on a device: it is the current GPU, and none is being captured."""
    if device.type != "cuda" or device.index != torch.cuda.current_device():
        return False
    return not torch.cuda.is_current_stream_capturing()
