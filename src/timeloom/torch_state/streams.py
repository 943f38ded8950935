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


class Watch:
    """How long a GPU's stream takes for what is put on it between two moments: what waits before it does not count."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def milliseconds(self) -> float:
        """Waits until the GPU has done it."""
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended))


def watch(device: torch.device) -> Watch | None:
    """One that runs; None where there is no GPU to watch, or where its work goes into a CUDA graph."""
    return Watch() if may_replay(device) else None
