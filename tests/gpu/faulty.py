"""Injected faults: kernels that cannot be compiled or launched, a GPU without memory. Training must go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import timeloom as tl
from tests.gpu.around import results, trio
from tests.gpu.checks import Check, Unfit, as_good_as_torch
from timeloom.kernels import faults, replay
from timeloom.kernels.cuda import dense, nvrtc, programs
from timeloom.kernels.cuda.driver import LaunchError

CHUNKS = tl.solvers.Shooting(chunk=32)


def faulty() -> list[Check]:
    cases: list[tuple[str, int, Any, str]] = [
        ("gru", 32, CHUNKS, "compiler"), ("gru", 32, "auto", "compiler"), ("lstm", 64, "auto", "forward"),
        ("gru", 64, CHUNKS, "adjoint"), ("rnn", 33, "auto", "adjoint"), ("lstm", 40, "auto", "carry"),
        ("gru", 48, CHUNKS, "certify"), ("gru", 600, CHUNKS, "compiler"), ("lstm", 600, "auto", "compiler"),
    ]  # fmt: skip
    found = [
        Check(f"{kind} n={n} {'auto' if solver == 'auto' else 'chunks'}: no {part}", partial(_goes_on, *case))
        for case in cases
        for kind, n, solver, part in (case,)
    ]
    found.append(Check("no memory for a kernel", _no_memory_for_kernel))
    found.append(Check("no memory for a layer, and then again", _no_memory))
    found.append(Check("linear_scan without its kernel", _scan))
    return found


@contextmanager
def put_in(part: str, counted: list[str]) -> Iterator[None]:
    """Context in which one part that kernels need is missing; compiled kernels are dropped before and after."""

    def forget() -> None:
        for ready in (programs.sweep_function, programs.chain_function, programs.wide_function, dense.chain_function):
            ready.cache_clear()
        replay.RECORDINGS.clear()  # whose replays need no launches
        faults._broken.clear()

    def broken(right: Callable[..., Any], chosen: Callable[..., bool], error: Exception) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if chosen(*given):
                counted.append(part)
                raise error
            return right(*given, **named)

        return call

    forget()
    if part == "compiler":
        error = nvrtc.CompileError("NVRTC did not compile with --gpu-architecture=sm_999:\nand more")
        patches = [patch.object(programs, "compile_source", broken(programs.compile_source, lambda *_: True, error))]
    else:
        words = "out of memory (2)" if part == "memory" else "no kernel image is available (209)"
        refused = LaunchError(f"CUDA's driver refused cuModuleLoadData: {words}")
        chosen = lambda _, __, name, *___: part in (name, "memory")  # noqa: E731
        patches = [patch.object(programs, "Function", broken(programs.Function, chosen, refused))]
    try:
        for one in patches:
            one.start()
        yield
    finally:
        for one in patches:
            one.stop()
        forget()


def _goes_on(kind: str, n: int, solver: Any, part: str, device: str) -> str:
    """Results stay right, with one warning and no second attempt."""
    if device == "cpu":
        raise Unfit("kernels for a GPU")
    own, theirs, exact = trio(kind, n, device, solver)
    x = torch.randn(4096 if solver == "auto" else 700, 2, 8, device=device)
    expected = results(theirs, x), results(exact, x.double())
    counted: list[str] = []
    with put_in(part, counted):
        said = _told(lambda: as_good_as_torch(results(own, x), *expected))
        if counted and not (len(counted) == 1 and len(said) == 1 and "kernel cannot run" in said[0]):
            raise AssertionError(f"tried {len(counted)} times, told {said}")
        if not counted and (solver != "auto" or part == "compiler"):
            raise AssertionError(f"no {part} was asked for")
        more = _told(lambda: as_good_as_torch(results(own, x), *expected))
        if more or len(counted) > 1:
            raise AssertionError(f"tried {len(counted)} times, told again: {more}")
    as_good_as_torch(results(own, x), *expected)
    return (said or ["never asked for"])[0]


def _told(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(entry.message) for entry in caught if str(entry.message).startswith("timeloom")]


def _no_memory_for_kernel(device: str) -> str:
    if device == "cpu":
        raise Unfit("kernels for a GPU")
    own, theirs, exact = trio("gru", 56, device, CHUNKS)
    x = torch.randn(300, 2, 8, device=device)
    with put_in("memory", []):
        text = _out_of_memory(lambda: results(own, x))
    as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
    return text


def _no_memory(device: str) -> str:
    """As with torch's layers: an error that can be caught, after which a call with a smaller batch runs."""
    if device == "cpu":
        raise Unfit("a GPU's memory")
    own, theirs, exact = trio("gru", 64, device, CHUNKS)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + (256 << 20)) / total))
    try:
        text = _out_of_memory(lambda: results(own, torch.randn(4000, 256, 8, device=device)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if faults._broken:
        raise AssertionError(f"called broken: {faults._broken}")
    x = torch.randn(300, 2, 8, device=device)
    as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
    return text


def _out_of_memory(run: Callable[[], Any]) -> str:
    try:
        run()
    except torch.OutOfMemoryError as error:
        return str(error).splitlines()[0][:100]
    raise AssertionError("nothing was raised")


def _scan(device: str) -> str:
    if device == "cpu":
        raise Unfit("kernels for a GPU")
    from timeloom.scan import gpu

    torch.manual_seed(0)
    a, b = (torch.rand(300, 3, 5, device=device) for _ in range(2))

    def run(dtype: torch.dtype, method: Any) -> dict[str, Tensor]:
        leaves = [part.to(dtype).requires_grad_() for part in (a, b)]
        h = tl.linear_scan(*leaves, method=method)
        h.sin().sum().backward()
        return {"h": h, **{f"grad {index}": leaf.grad for index, leaf in enumerate(leaves) if leaf.grad is not None}}

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no binary for this GPU")

    truth, theirs = run(torch.float64, "reference"), run(torch.float32, "reference")
    with patch.object(gpu, "launch", fail):
        said = _told(lambda: as_good_as_torch(run(torch.float32, "auto"), theirs, truth))
    faults._broken.clear()
    if len(said) != 1:
        raise AssertionError(f"told {said}")
    return said[0]
