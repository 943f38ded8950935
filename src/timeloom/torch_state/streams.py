"""The state of a GPU's streams: captures, and times."""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    """Whether work on this device is being captured into a CUDA graph, so that no number can be read."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device.index):
        return torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The handle of a GPU's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def may_replay(device: torch.device) -> bool:
    """Whether a CUDA graph may be launched on a device: it is the current GPU, and none is being captured."""
    if device.type != "cuda" or device.index != torch.cuda.current_device():
        return False
    return not torch.cuda.is_current_stream_capturing()


class Watch:
    """Times the work put on a GPU's stream between two moments, without what was queued before."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def milliseconds(self) -> float:
        """The time; waits until the GPU is done."""
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended))


def watch(device: torch.device) -> Watch | None:
    """A running watch; None without a GPU, or if its work is being captured into a CUDA graph."""
    return Watch() if may_replay(device) else None
