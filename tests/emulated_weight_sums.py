"""The kernels of weight_sums.cu on a CPU: the same source, run by the emulator."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
from emulator import library

from timeloom.kernels.cuda import weight_sums
from timeloom.kernels.cuda.programs import WeightSumsArgs, headers
from timeloom.kernels.cuda.weight_sums import ADDERS, Tile

ENTRY = """
alignas(128) unsigned char shared[{shared}];
extern "C" const char *emulate_sum_weights(const WeightSumsArgs *a, int blocks, int in_reverse) {{
  for (unsigned char &byte : shared) byte = 0xff;
  return emulated::run(blocks, COLUMNS, in_reverse, [a] {{ sum_weights(*a); }});
}}
extern "C" const char *emulate_add_up(const WeightSumsArgs *a, int blocks, int in_reverse) {{
  return emulated::run(blocks, {adders}, in_reverse, [a] {{ add_up(*a); }});
}}
"""


@cache
def _library(tile: Tile, aligned: bool) -> ctypes.CDLL:
    entry = ENTRY.format(shared=max(tile.shared_bytes, 16 * ADDERS), adders=ADDERS)
    return library(tile.source(aligned) + entry, headers())


def emulate(monkeypatch: pytest.MonkeyPatch, in_reverse: bool = False, processors: int = 3) -> list[tuple[str, int]]:
    """Let `weight_sums` run its kernels on CPU tensors; the returned list is filled with their launches as they run."""
    launches: list[tuple[str, int]] = []

    def function(device: int, tile: Tile, aligned: bool, name: str) -> Any:
        def launch(blocks: int, args: WeightSumsArgs) -> None:
            run = getattr(_library(tile, aligned), f"emulate_{name}")
            run.restype = ctypes.c_char_p
            failure = run(ctypes.byref(args), blocks, in_reverse)
            assert failure is None, failure.decode()
            launches.append((name, blocks))

        return launch

    monkeypatch.setattr(weight_sums, "function", function)
    monkeypatch.setattr(weight_sums, "can_run", lambda grads: True)
    monkeypatch.setattr(weight_sums, "in_one_pass", lambda steps, columns: True)
    monkeypatch.setattr(weight_sums, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(weight_sums, "processors", lambda index: processors)
    return launches
