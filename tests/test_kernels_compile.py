"""The Triton kernels, compiled for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_all_kernels_compile(tmp_path: Path) -> None:
    """In a process of its own: Triton interprets kernels or compiles them, as told when they are imported."""
    script = Path(__file__).with_name("compile_kernels.py")
    cache = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], env={**os.environ, **cache}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    done_to = {"compiled": set(), "relaunched": set()}
    for line in done.stdout.splitlines():
        verb, _, kernel = line.partition(" ")
        done_to[verb].add(kernel)
    scans = {"diagonal_kernel", "transfers_kernel", "matrix_kernel"}
    products = {"split_kernel", "by_split_kernel", "look_kernel", "outer_kernel"}
    assert done_to["compiled"] == {*scans, *products, "tiny_kernel"}
    assert done_to["relaunched"] == done_to["compiled"]
