"""Kernels that are compiled in the background before they are needed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from timeloom.cells.base import NO_MASKS, Masks
from timeloom.kernels import cache
from timeloom.kernels.cuda import nvrtc, programs
from timeloom.kernels.cuda import sweeper as cuda
from timeloom.kernels.cuda.ahead import Ahead, threads_to_spare
from timeloom.kernels.cuda.programs import Variant

with_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason="needs NVRTC")


class Held:
    """A build that ends when it is told to."""

    def __init__(self) -> None:
        self.began, self.end = threading.Event(), threading.Event()

    def __call__(self) -> bytes:
        self.began.set()
        assert self.end.wait(20)
        return b"held"


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_is_under_way_is_waited_for_and_taken_once() -> None:
    ahead, build = Ahead(), Held()
    ahead.begin("key", build)
    assert build.began.wait(20)
    threading.Timer(0.05, build.end.set).start()
    assert ahead.take("key") == b"held"
    assert ahead.take("key") is None


def test_what_has_not_begun_is_left_to_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timeloom.kernels.cuda.ahead.threads_to_spare", lambda: 1)
    ahead, first, built = Ahead(), Held(), []
    ahead.begin("first", first)
    assert first.began.wait(20)
    ahead.begin("second", lambda: built.append("second") or b"")  # type: ignore[func-returns-value]
    ahead.begin("third", lambda: built.append("third") or b"third")  # type: ignore[func-returns-value]
    assert ahead.take("second") is None
    first.end.set()
    assert ahead.take("first") == b"held"
    until(lambda: bool(built))
    assert built == ["third"]
    assert ahead.take("third") == b"third"


def test_a_key_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, build, again = Ahead(), Held(), Held()
    ahead.begin("key", build)
    assert build.began.wait(20)
    ahead.begin("key", again)
    build.end.set()
    assert ahead.take("key") == b"held"
    assert not again.began.is_set()


def test_what_fails_is_left_to_who_needs_it() -> None:
    ahead = Ahead()
    ahead.begin("key", lambda: bytes(int("no number")))
    until(lambda: ahead._threads == 0)
    assert ahead.take("key") is None


def test_what_was_taken_is_not_built_again() -> None:
    ahead, again = Ahead(), Held()
    ahead.begin("key", lambda: b"made")
    until(lambda: ahead._threads == 0)
    assert ahead.take("key") == b"made"
    ahead.begin("key", again)
    assert ahead.take("key") is None
    assert not again.began.is_set()


def test_where_no_thread_can_start_nothing_is_built_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ahead = Ahead()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        ahead.begin("first", lambda: b"first")
    assert ahead.take("first") is None
    ahead.begin("second", lambda: b"second")
    until(lambda: ahead._threads == 0)
    assert ahead.take("second") == b"second"


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, "", 1), (4, "", 3), (64, "", 8), (16, "8", 1), (64, "4", 8)]
)
def test_threads_leave_a_core_and_are_shared_by_ranks(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: str, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert threads_to_spare() == threads


def test_threads_end_with_their_work_and_begin_anew() -> None:
    ahead = Ahead()
    for number in range(3):
        keys = [f"{number} {key}" for key in range(20)]
        for key in keys:
            ahead.begin(key, lambda: b"made")
        assert {ahead.take(key) or b"made" for key in keys} == {b"made"}
        until(lambda: ahead._threads == 0)
        assert not [one for one in threading.enumerate() if one.name == "timeloom-compile"], number


SCRIPT = """
import os, threading, time
from timeloom.kernels.cuda.ahead import AHEAD
began = threading.Event()
def slow():
    began.set()
    time.sleep({seconds})
    return b""
for key in range(200):
    AHEAD.begin(str(key), slow)
began.wait()
{rest}
"""


def run(seconds: float, rest: str = "") -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", SCRIPT.format(seconds=seconds, rest=rest)], check=True, timeout=100)
    return time.monotonic() - began


def test_the_end_of_a_program_waits_for_no_work_that_has_not_begun() -> None:
    assert run(2.0) < 40.0, "200 builds of two seconds by at most eight threads take 50"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_its_parents_threads() -> None:
    child = """
if not (child := os.fork()):
    assert AHEAD.take("0") is None
    AHEAD.begin("own", lambda: b"own")
    made = AHEAD.take("own")
    os._exit(0 if made in (b"own", None) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    run(0.2, child)


# ---- which kernels ---------------------------------------------------------------------------------------------------


@pytest.fixture
def foreseen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Variant]]:
    found: list[Variant] = []
    processors = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(cuda, "foresee", lambda _, variants: found.extend(variants))
    caches: list[Any] = [
        cuda._foresee, cuda._variant, cuda.most_single, programs.architecture, programs.shared_room
    ]  # fmt: skip
    for cached in caches:
        cached.cache_clear()
    yield found
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernel", "units"), [("gru", 64), ("gru", 128), ("lstm", 48), ("lstm", 96), ("rnn_tanh", 256)]
)
def test_all_kernels_of_a_training_are_foreseen(
    kernel: str, units: int, weights: torch.dtype, foreseen: list[Variant]
) -> None:
    """Those by which sweeps with and without corrections, their certificates, and one chunk run."""
    masks = Masks(True) if kernel == "gru" else NO_MASKS
    cuda._foresee(kernel, units, weights, True, True, masks, 0)
    keeps = 2 if programs.text_of(kernel, masks).saved else 1
    passes = [(False, keeps), (False, 0), (True, 1), (True, 0)]
    for rows, (adjoint, stores), decay in itertools.product((1, 32, 1024), passes, (False, True)):
        if stores == 0 and not decay:
            continue  # a sweep that stores nothing is followed by a correction
        variant = cuda._variant(kernel, units, weights, 1, adjoint, rows, stores, decay, True, masks, 0)
        assert not isinstance(variant, Variant) or variant in foreseen
    assert len(foreseen) == len(set(foreseen))
    inference, _ = len(foreseen), foreseen.clear()
    cuda._foresee(kernel, units, weights, False, True, masks, 0)
    assert len(foreseen) == inference // 2
    assert not any(variant.adjoint or variant.stores == 2 for variant in foreseen)


@with_nvrtc
def test_what_was_foreseen_is_not_compiled_again(
    foreseen: list[Variant], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(cache, "folders", lambda: iter([tmp_path]))  # none that other tests have filled
    compiled: list[str] = []
    honest = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda source, *more: (compiled.append(source), honest(source, *more))[1])
    monkeypatch.setattr(programs, "Function", lambda device, code, *_: code)
    cuda._foresee("rnn_tanh", 8, torch.float32, True, False, NO_MASKS, 0)
    programs.foresee(0, foreseen)
    programs.sweep_function.cache_clear()
    try:
        codes = [programs.sweep_function(0, variant) for variant in foreseen]
    finally:
        programs.sweep_function.cache_clear()
    assert all(variant.name.encode() in code for variant, code in zip(foreseen, codes, strict=True))
    until(lambda: not [one for one in threading.enumerate() if one.name == "timeloom-compile"])
    assert len(compiled) == len(set(compiled)) == len(foreseen) + 1, "and the chain's"
