"""Time and memory of calls on a GPU: CUDA events, CUDA graphs, the allocator's peak."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

DEVICE = "cuda"
LEARNING_CALLS = 8
"""Calls from which timeloom learns what a network needs."""
LEARNING_SECONDS = 4.0
"""Seconds after which no further learning calls are made."""


def event_seconds(call: Callable[[], object]) -> float:
    """Seconds of a call by CUDA events, including the host's time, since the GPU is idle before it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of a call, after three to warm up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(event_seconds(call) for _ in range(9))


def learn(step: Callable[[], object]) -> None:
    """Calls the step until timeloom knows the network."""
    began = time.perf_counter()
    for _ in range(LEARNING_CALLS):
        step()
        torch.cuda.synchronize()
        if time.perf_counter() - began > LEARNING_SECONDS:
            return


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The same call as a CUDA graph: one launch for all of its kernels. Raises RuntimeError if that is impossible."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def peak_bytes(step: Callable[[], object]) -> int:
    """Bytes by which a call raises the peak of torch's allocator."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before
