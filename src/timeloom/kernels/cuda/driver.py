"""The CUDA driver through ctypes: load machine code, launch kernels.

A kernel takes one parameter, a structure by value, so that a launch is one call with one pointer.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

MOST_SHARED, LARGE_CLUSTERS = 8, 14
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED"""
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING"""
PORTABLE = 8
"""Blocks per cluster that every GPU with clusters supports."""


class LaunchError(RuntimeError):
    """The driver refused to load or launch a kernel."""


class Function:
    """One kernel on one device."""

    def __init__(
        self, device: int, machine_code: bytes, name: str, threads: int, shared: int, cluster: int = 1
    ) -> None:
        """`threads` and bytes of dynamic `shared` memory per block, and blocks per `cluster`."""
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the device's context the current one
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            _check(_driver().cuModuleLoadData(ctypes.byref(module), machine_code), "cuModuleLoadData")
            _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
            if shared > 48 << 10:
                _check(_driver().cuFuncSetAttribute(function, MOST_SHARED, shared), f"{shared} bytes of shared memory")
            if cluster > PORTABLE:
                _check(_driver().cuFuncSetAttribute(function, LARGE_CLUSTERS, 1), f"clusters of {cluster} blocks")
        self._function, self._threads, self._shared, self._device = function, threads, shared, device
        self._launch = _driver().cuLaunchKernel
        self.name = name

    def __call__(self, blocks: int, args: ctypes.Structure) -> None:
        """Launch on the current stream of the device; its context must be the current one."""
        given = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        status = self._launch(self._function, blocks, 1, 1, self._threads, 1, 1, self._shared, stream, given, None)
        if status:
            _check(status, f"{self.name} on {blocks} blocks of {self._threads} threads")


def executable(graph: torch.cuda.CUDAGraph) -> int | None:
    """The handle of a graph for `launch`, None if torch does not expose it; the graph must draw no random numbers.

    For graphs that do, torch's own replay copies its generator's state to the GPU before each launch.
    """
    found = getattr(graph, "raw_cuda_graph_exec", None)
    return None if found is None else int(found())


def launch(graph: int, stream: int) -> None:
    """Launch an executable graph on a stream; the context of its device must be the current one."""
    status = _driver().cuGraphLaunch(graph, stream)
    if status:
        _check(status, "a CUDA graph")


def new_stream(device: int) -> int:
    """The handle of a new stream, not torch's, that does not wait for the default stream. It is never destroyed."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        stream = ctypes.c_void_p()
        _check(_driver().cuStreamCreate(ctypes.byref(stream), NON_BLOCKING), "cuStreamCreate")
    assert stream.value is not None
    return stream.value


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    driver.cuLaunchKernel.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
    driver.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    driver.cuGraphLaunch.argtypes = [pointer, pointer]
    return driver


def _check(status: int, what: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    raise LaunchError(f"CUDA's driver refused {what}: {(text.value or b'unknown error').decode()} ({status})")
