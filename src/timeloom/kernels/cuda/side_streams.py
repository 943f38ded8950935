"""Streams to record on, one for each stream that replays, with memory for cuBLAS that outlives all recordings.

Products write into a workspace that torch keeps for every thread's cuBLAS and every stream, and a recording writes into
that of the stream on which it was recorded. So recordings of different streams, which may run at the same time, are
made on different ones; none of them is a stream that torch hands out, on which others might run products of their own.
And a workspace must not be freed while a recording lives, though whoever holds it first may be gone and torch may give
all workspaces back (it does around graphs of torch.compile): it lies in a pool that nothing else takes memory from.
"""

from __future__ import annotations

import torch

from timeloom.kernels.cuda import driver

_SIDES: dict[tuple[int, int], SideStream] = {}


def beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream to record on what `stream` will replay; only one thread at a time may ask."""
    key = stream.device_index, stream.cuda_stream
    if key not in _SIDES:
        _SIDES[key] = SideStream(torch.device("cuda", stream.device_index))
    side = _SIDES[key]
    side.hold_workspaces()
    return side.stream


class SideStream:
    """A stream of our own on a device, and the pool that cuBLAS' workspaces for it lie in."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.ExternalStream(driver.new_stream(device.index), device)
        self._pool = torch.cuda.graph_pool_handle()
        self._matrix = torch.ones(32, 32, device=device)
        self._holder: torch.cuda.CUDAGraph | None = None
        """Never replayed: while it lives, so does the pool."""

    def hold_workspaces(self) -> None:
        """Have this thread's workspaces for the stream lie in the pool, where torch has none or gave them back."""
        torch.cuda.current_blas_handle()  # cannot be made inside a capture
        holder = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            holder.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                torch.mm(self._matrix, self._matrix)
                torch.addmm(self._matrix[0], self._matrix, self._matrix)  # by cuBLASLt, which has its own
            finally:
                holder.capture_end()
        self._holder = holder  # only now, so that the pool is held all the while
