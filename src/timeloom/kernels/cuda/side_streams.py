"""Streams to capture on, one for each stream that replays, with cuBLAS workspaces that outlive all recordings.

cuBLAS writes into a workspace that torch keeps for each of its handles (one per thread) and streams, and a recording
writes into the workspace of the stream it was captured on. So recordings that are replayed on different streams, and
may run at the same time, are captured on different streams; none of these comes from torch's pool, where others might
run products of their own. And a workspace must not be freed while a recording lives, though its thread may end and
torch may free all workspaces (as it does around graphs of torch.compile): it lies in a memory pool that nothing else
allocates from.
"""

from __future__ import annotations

import torch

from timeloom.kernels.cuda import driver

_SIDES: dict[tuple[int, int], SideStream] = {}


def beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream to capture on what `stream` will replay; only one thread at a time may call this."""
    key = stream.device_index, stream.cuda_stream
    if key not in _SIDES:
        _SIDES[key] = SideStream(torch.device("cuda", stream.device_index))
    side = _SIDES[key]
    side.hold_workspaces()
    return side.stream


class SideStream:
    """A stream of our own on a device, and the memory pool of its cuBLAS workspaces."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.ExternalStream(driver.new_stream(device.index), device)
        self._pool = torch.cuda.graph_pool_handle()
        self._matrix = torch.ones(32, 32, device=device)
        self._holder: torch.cuda.CUDAGraph | None = None
        """A graph that is never replayed: it keeps the pool alive."""

    def hold_workspaces(self) -> None:
        """Allocate this thread's workspaces for the stream in the pool, if torch has none or has freed them."""
        torch.cuda.current_blas_handle()  # cannot be created inside a capture
        holder = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            holder.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                torch.mm(self._matrix, self._matrix)
                torch.addmm(self._matrix[0], self._matrix, self._matrix)  # by cuBLASLt, with its own workspace
            finally:
                holder.capture_end()
        self._holder = holder  # only now, so that the pool is held all the while
