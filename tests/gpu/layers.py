"""Modules and cells as configurations of the fuzzer: every width, direction, dtype, solver and kind of input."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import fuzz
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.networks import USER_CELLS
from tests.gpu.checks import Check, cases, of_case

WIDTHS = (1, 3, 16, 33, 64, 65, 128, 129, 200, 300, 512, 600, 1024)
CHUNKS: dict[str, Any] = {"solver": "Shooting", "options": {"chunk": 32}}
GATED = ("GRU", "LSTM")


def modules() -> list[Check]:
    """Every width, with options of layers: directions, biases, layouts, initial states."""
    found = []
    for n in WIDTHS:
        inputs = min(n, 64)
        found += [
            Case(cell="GRU", n=n, inputs=inputs, T=300, B=2, h0=True, **CHUNKS),
            Case(cell="GRU", n=n, inputs=3, T=257, B=1, bias=False, calls=2),
            Case(cell="LSTM", n=n, inputs=inputs, T=300, B=3, batch_first=True, **CHUNKS),
            Case(cell="LSTM", n=n, inputs=inputs, layers=2, bidirectional=True, T=130, B=5, h0=True, calls=2),
            Case(cell="RNN", n=n, inputs=inputs, T=300, B=2, tf32=False, **CHUNKS),
            Case(cell="GRU", n=n, inputs=7, layers=2, bidirectional=True, T=129, B=17, tf32=False, **CHUNKS),
        ]
    found += [Case(cell=cell, n=33, T=T, B=B, **CHUNKS) for cell in GATED for T, B in ((1, 1), (2, 64), (4097, 1))]
    found += [Case(cell=cell, n=40, T=200, B=0, h0=True, **CHUNKS) for cell in (*GATED, "RNN_RELU")]
    found += [Case(cell="LSTM", n=n, proj=n // 3, T=150, B=3, h0=True, **CHUNKS) for n in (5, 64, 200)]
    found += [Case(cell=cell, n=64, T=600, B=2, grad=False, calls=2) for cell in GATED]
    return cases(found)


def ragged() -> list[Check]:
    """Lengths, packed sequences, resets, and lengths with resets."""
    found = []
    kinds = (("lengths", False), ("packed", False), ("", True), ("lengths", True))
    for (cell, n), (kind, resets) in product(
        (("GRU", 3), ("GRU", 129), ("LSTM", 33), ("RNN", 64), ("LSTM", 300)), kinds
    ):
        common: dict[str, Any] = {"cell": cell, "n": n, "inputs": 16, "ragged": kind, "resets": resets, "h0": True}
        found.append(Case(T=300, B=5, **common, **CHUNKS))
        if n < 100:
            found.append(Case(T=150, B=4, layers=2, bidirectional=True, batch_first=True, **common, **CHUNKS))
    found.append(Case(n=600, inputs=64, bias=False, T=257, B=4, ragged="lengths", dtype="float16"))
    return cases(found)


def dtypes() -> list[Check]:
    """Half precision, float64 and autocast."""
    found = []
    for cell, n in product(GATED, (16, 65, 200, 512)):
        common: dict[str, Any] = {"cell": cell, "n": n, "inputs": 32, "T": 256, "B": 3}
        found += [Case(dtype=dtype, **common, **CHUNKS) for dtype in ("float16", "bfloat16")]
        found += [Case(autocast=lower, calls=2, **common) for lower in ("float16", "bfloat16")]
        if n <= 200:
            found.append(Case(dtype="float64", **common, **CHUNKS))
    found += [Case(cell="RNN", n=64, T=100, dtype=dtype, **CHUNKS) for dtype in ("float16", "bfloat16", "float64")]
    found.append(Case(n=129, bidirectional=True, T=2, B=3, dtype="float16", solver="Shooting", options={"chunk": 1}))
    return cases(found)


def solvers() -> list[Check]:
    """Every solver, and the options that change what runs."""
    shooting: list[dict[str, Any]] = [
        {"chunk": 3}, {"chunk": 16, "correction": "diag"}, {"chunk": 16, "correction": "newton"},
        {"chunk": 16, "correction": "secant"}, {"chunk": 16, "correction": "lowrank", "rank": 4},
        {"chunk": 100, "warmup": 0}, {"chunk": 32, "correction": "none", "warmup": 40}, {"adjoint": "scan"},
        {"adjoint": "mgrit", "chunk": 16}, {"adjoint": "sequential", "chunk": 16},
    ]  # fmt: skip
    options: list[tuple[str, dict[str, Any]]] = [("Shooting", given) for given in shooting]
    options += [("MGRIT", {}), ("MGRIT", {"coarsening": 4, "cycle": "F"}), ("DEER", {}), ("QuasiDEER", {})]
    options += [("ELK", {}), ("QuasiELK", {}), ("Picard", {}), ("Jacobi", {}), ("Sequential", {}), ("auto", {})]
    found = []
    for solver, given in options:
        found += [
            Case(cell="GRU", n=16, T=150, B=3, solver=solver, options=given, h0=True),
            Case(cell="LSTM", n=17, T=120, B=2, solver=solver, options=given, gate_bias=1.0),
            Case(cell="RNN", n=8, T=150, B=2, solver=solver, options=given, tf32=False),
        ]
    found.append(Case(cell="GRU", n=16, T=200, solver="MGRIT", options={"coarse": "implicit"}))
    recorded: dict[str, Any] = {"T": 300, "B": 2, "calls": 5, "solver": "MGRIT", "gate_bias": 3.0, "tf32": False}
    for cell in ("GRU", "ImplicitGRU", "LSTM", "RNN"):  # coarse levels are recorded from the third call on
        found.append(Case(cell=cell, n=16, options={"coarsening": 4, "guess": "initial"}, **recorded))
    return cases(found)


def newton() -> list[Check]:
    """The fused kernels of Newton steps and of the gradients' scan: every width they support, long memory, overflow."""
    found = []
    by: tuple[dict[str, Any], ...] = ({"solver": "DEER"}, {"solver": "Shooting", "options": {"adjoint": "scan"}})
    widths = [("GRU", n) for n in (1, 2, 7, 8, 9, 16, 20, 31, 32)] + [("LSTM", n) for n in (1, 6, 8, 15, 16)]
    for cell, n in [*widths, ("RNN", 5), ("RNN", 20), ("RNN", 32), ("RNN_RELU", 12)]:
        common: dict[str, Any] = {"cell": cell, "n": n, "inputs": 3, "tf32": False}
        for given in by:
            found += [Case(T=700, B=3, h0=True, calls=2, **common, **given), Case(T=1, B=2, **common, **given)]
            found.append(Case(T=4097, B=1, layers=2, bidirectional=True, **common, **given))
    for (cell, n), given in product((("GRU", 16), ("GRU", 32), ("LSTM", 16), ("RNN", 20)), by):
        common = {"cell": cell, "n": n, "T": 2048, "B": 2, "tf32": False}
        found += [Case(scale=scale, **common, **given) for scale in (2.0, 4.0)]
        if cell != "RNN":
            found += [Case(gate_bias=bias, **common, **given) for bias in (3.0, 6.0)]
    found += [Case(cell="GRU", n=20, T=1500, B=256, **given) for given in by]
    return cases(found)


def cells() -> list[Check]:
    """The implicit GRU, and users' cells."""
    found = []
    for cell in USER_CELLS:
        found += [Case(cell=cell, n=n, inputs=8, T=120, B=3, h0=True, **CHUNKS) for n in (5, 64)]
        found += [Case(cell=cell, n=16, inputs=8, T=90, B=2, calls=2), Case(cell=cell, n=9, T=60, dtype="float64")]
    for n in (1, 16, 65, 200):
        found.append(Case(cell="ImplicitGRU", n=n, inputs=8, T=100, B=2, h0=True, **CHUNKS))
    found.append(Case(cell="ImplicitGRU", n=16, layers=2, bidirectional=True, T=60, ragged="lengths", **CHUNKS))
    return cases(found)


def regimes() -> list[Check]:
    """Long memory, large weights, trained weights; and earlier findings."""
    found = []
    for cell, n in product(GATED, (32, 65, 128)):
        common: dict[str, Any] = {"cell": cell, "n": n, "inputs": 16, "T": 2048, "B": 2, "calls": 2}
        found += [Case(gate_bias=3.0, **common), Case(gate_bias=6.0, scale=2.0, **common), Case(trained=30, **common)]
        found.append(Case(cell=cell, n=n, inputs=16, T=512, B=2, scale=3.0, tf32=False, **CHUNKS))
    known = json.loads((Path(fuzz.__file__).with_name("known.json")).read_text())
    return cases(found) + [of_case(Case.of(entry)) for entry in known]  # with the seeds of the findings
