"""Draws configurations: mostly small and fast, sometimes long, wide or both, within the limits of the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.fuzz.case import FEATURES, POISONS, TWINS, Case
from benchmarks.fuzz.networks import USER_CELLS

WIDTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 96, 100, 127, 128, 129, 160, 200, 255, 256, 257)
WIDE = (300, 384, 400, 500, 512, 513, 600, 700, 768, 1000, 1023, 1024)
BATCHES = (0, 1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 64)
DENSE = ("DEER", "ELK")
"""Solvers that hold a matrix for every step."""
STEPWISE = (*DENSE, "QuasiDEER", "QuasiELK", "Picard", "Jacobi")


@dataclass(frozen=True)
class Limits:
    """What a case may cost."""

    work: tuple[float, float]
    """Powers of ten between which the limit on a pass's multiplications is drawn."""
    steps: int
    """Most steps in torch's own loop, layers and directions together."""
    loop: int
    """Most steps of a loop in Python, which cells without a layer in torch are compared with."""
    trained: int
    """Most units of a network that is trained first."""
    trained_share: float
    """Share of networks that are trained first, among those that torch also has."""
    long_share: float
    """Share of sequences longer than the usual `LONG`: they take most of the time, and find no more than others."""


LIMITS = {
    "cuda": Limits((6.0, 11.0), 12_000, 300, 129, 0.1, 0.08),
    "cpu": Limits((4.5, 8.0), 9_000, 150, 33, 0.05, 0.03),
}
LONG, LONGEST = 1000, 9000
"""Most steps of usual cases, and of long ones."""
FEATURE_STEPS, FEATURE_UNITS = 80, 65
"""Most steps and units if the reference for a feature is a loop in Python, or a graph of gradients."""
DENSE_UNITS, DENSE_UNITS_OWN = 65, 8
"""Most units if every step has a matrix; the same for users' cells, whose Jacobians are computed row by row."""
LEARNED = ("secant", "lowrank")
PACES = (
    {"calls": 1},
    {"calls": 4, "drift": 1e-2},
    {"calls": 12},
    {"calls": 12, "drift": 1e-3},
    {"calls": 30, "drift": 1e-3},
)
"""How a training goes on: its calls, and how far they move the weights."""
SHORTEST_TRAINING, LONGEST_TRAINING, LONGEST_OWN = 400, 12_000, 1_500
"""Steps of the sequences of a training, times layers and directions; those of cells whose reference loops in Python."""
STEPWISE_UNITS_OWN = 33
"""Most units of users' cells if every step has a diagonal, for the same reason."""


def draw(seed: int, index: int, device: str) -> Case:
    """The configuration number `index` of a seed: the same on every machine."""
    return _drawn(Random(f"{seed}:{index}"), device)


def draw_feature(seed: int, index: int, device: str) -> Case:
    """The same for configurations that use a feature, with a random stream of their own, apart from `draw`'s."""
    random = Random(f"features:{seed}:{index}")
    feature = random.choice(FEATURES)
    case = _using(feature, _drawn(random, device), random)
    gated = case.cell in ("GRU", "ImplicitGRU") and feature != "dropout"
    if case.options.get("coarse") == "implicit" and not gated:  # the cell was changed, or has masks
        return replace(case, options={**case.options, "coarse": "frozen"})
    return case


def draw_poisoned(seed: int, index: int, device: str) -> Case:
    """The same of those with a number in their input that is none, or far too large: numbers of their own, too."""
    random = Random(f"poisoned:{seed}:{index}")
    return replace(_drawn(random, device), poison=random.choice(POISONS))


def draw_learned(seed: int, index: int, device: str) -> Case:
    """The same of those whose corrections are learned from sweeps: numbers of their own, too."""
    random = Random(f"learned:{seed}:{index}")
    case = replace(_drawn(random, device), solver="Shooting", calls=1)
    options = {name: value for name, value in case.options.items() if name in ("adjoint", "tol")}
    options |= {"chunk": random.choice((1, 2, 3, 7, 16, 33)), "correction": random.choice(LEARNED)}
    return replace(case, options=options | {"warmup": random.choice((0, 0, 1, 5, 40))})


def draw_training(seed: int, index: int, device: str) -> Case:
    """The same of long sequences that `auto` runs as a training does, call after call with weights that move."""
    random = Random(f"training:{seed}:{index}")
    case = replace(_drawn(random, device), solver="auto", options={}, **random.choice(PACES))
    own = case.cell in USER_CELLS
    n = min(case.n, random.choice((8, 17, 33) if own else (8, 33, 64, 129)))
    case = replace(case, n=n, inputs=min(case.inputs, n), proj=min(case.proj, n - 1), B=min(case.B, 8))
    longest = (LONGEST_OWN if own or case.cell == "ImplicitGRU" else LONGEST_TRAINING) / (case.layers * case.directions)
    return replace(case, T=int(math.exp(random.uniform(math.log(SHORTEST_TRAINING), math.log(longest)))))


def _drawn(random: Random, device: str) -> Case:
    limits = LIMITS[device]
    case = _network(random)
    case = replace(case, seed=random.randrange(2**31), **_regime(random, case, limits))
    case = replace(case, **_precision(random, case, device))
    case = replace(case, **_input(random, case, limits))
    solver, options = _solver(random, case, device)
    case = replace(case, solver=solver, options=options, calls=random.choice((1, 1, 2, 3)) if solver == "auto" else 1)
    return _bounded(case, 10 ** random.uniform(*limits.work), limits, random.random() < 0.35)


def _using(feature: str, case: Case, random: Random) -> Case:
    """A case that can use the feature: with a layer that has it, short enough for a reference loop in Python."""
    own = case.cell in USER_CELLS
    if feature == "warm starts":
        return replace(case, feature=feature, calls=3, B=max(case.B, 1))
    case = replace(case, feature=feature, calls=1, T=min(case.T, FEATURE_STEPS), B=max(case.B, 1))
    if feature == "second order":
        case = replace(case, dtype=random.choice(("float32", "float64")), autocast="", grad=True)
        return replace(case, n=min(case.n, FEATURE_UNITS), proj=min(case.proj, FEATURE_UNITS - 1))
    if feature == "layer":
        cell = case.cell if own else random.choice(tuple(USER_CELLS))
        case = replace(case, ragged=random.choice(("", "lengths")), resets=random.random() < 0.5)
        case = replace(case, cell=cell, n=min(case.n, STEPWISE_UNITS_OWN), proj=0, trained=0, autocast="")
        return replace(case, layers=1, bidirectional=False, bias=True, batch_first=False)
    if case.cell not in TWINS:
        case = replace(case, cell=random.choice(TWINS))
    if feature == "compiled":
        return case
    if feature == "dropout":
        case = replace(case, dtype=random.choice(("float32", "float64")), autocast="", proj=0)
    return replace(case, layers=1, bidirectional=False, ragged="", resets=False)


def _network(random: Random) -> Case:
    cell = random.choices((*TWINS, "ImplicitGRU", "unroll"), weights=(6, 6, 2, 1, 1, 2))[0]
    n = random.choice(WIDE) if random.random() < 0.15 else random.choice(WIDTHS)
    inputs = random.choice((1, 2, 3, 7, 16, 33, 64, 128, 300, n, n))
    if cell == "unroll":
        return Case(cell=random.choice(tuple(USER_CELLS)), n=min(n, 100), inputs=min(inputs, 64))
    layers = random.choice((1, 1, 1, 1, 2, 2, 3))
    proj = random.randrange(1, n) if cell == "LSTM" and n > 1 and random.random() < 0.15 else 0
    return Case(
        cell=cell, n=n, inputs=inputs, layers=layers, proj=proj, bidirectional=random.random() < 0.25,
        batch_first=random.random() < 0.3, bias=random.random() < 0.8,
    )  # fmt: skip


def _regime(random: Random, case: Case, limits: Limits) -> dict[str, Any]:
    if case.cell in TWINS and random.random() < limits.trained_share:
        n = min(case.n, limits.trained)
        sizes = {"n": n, "inputs": min(case.inputs, 64), "proj": min(case.proj, n - 1)}
        return {"trained": random.choice((10, 30)), **sizes}
    biased = case.bias and case.cell not in ("RNN", "RNN_RELU") and random.random() < 0.5
    scaled = random.random() < 0.4
    return {
        "gate_bias": random.choice((1.0, 2.0, 3.0, 4.0, 6.0)) if biased else 0.0,
        "scale": random.choice((1.5, 2.0, 3.0, 4.0)) if scaled else 1.0,
        "x_scale": random.choice((1.0, 1.0, 1.0, 0.1, 4.0)),
    }


def _precision(random: Random, case: Case, device: str) -> dict[str, Any]:
    dtype = random.choices(("float32", "float64", "float16", "bfloat16"), weights=(12, 3, 2, 2))[0]
    autocast = ""
    if dtype == "float32" and case.cell in TWINS and random.random() < 0.12:
        autocast = random.choice(("float16", "bfloat16")) if device == "cuda" else "bfloat16"
    return {"dtype": dtype, "autocast": autocast, "tf32": random.random() < 0.5}


def _input(random: Random, case: Case, limits: Limits) -> dict[str, Any]:
    batch = random.choice(BATCHES)
    shortest, longest = (LONG, LONGEST) if random.random() < limits.long_share else (1, LONG)
    chosen: dict[str, Any] = {
        "T": 1 + int(math.exp(random.uniform(math.log(shortest), math.log(longest)))),
        "B": batch,
        "h0": random.random() < 0.4,
        "grad": random.random() < 0.85,
    }
    if case.cell in USER_CELLS:
        chosen["B"] = max(batch, 1)
    elif batch:
        kind = random.random()
        chosen["ragged"] = "lengths" if kind < 0.15 else "packed" if kind < 0.25 else ""
        chosen["resets"] = chosen["ragged"] != "packed" and random.random() < 0.12
    return chosen


def _solver(random: Random, case: Case, device: str) -> tuple[str, dict[str, Any]]:
    kinds = ("auto", "Shooting", "MGRIT", *STEPWISE, "Sequential")
    kind = random.choices(kinds, weights=(10, 10, 3, 1, 1, 1, 1, 1, 1, 1))[0]
    options: dict[str, Any] = {}
    if kind == "Shooting":
        options["chunk"] = random.choice((None, 1, 2, 3, 7, 16, 32, 33, 64, 100, 256, 1000))
        options["correction"] = random.choice(("auto", "none", "diag", "newton"))
        options["warmup"] = random.choice((None, None, 0, 1, 5, 40))
        if options["correction"] == "newton" and case.n > 100:
            options["correction"] = "diag"
    if kind == "MGRIT":
        options["coarsening"] = random.choice((None, 2, 4, 8))
        options["relaxation"] = random.choice(("FCF", "F"))
        options["cycle"] = random.choice(("V", "V", "F"))
        options["coarse"] = random.choice(("frozen", "implicit")) if case.cell in ("GRU", "ImplicitGRU") else "frozen"
    if kind not in ("auto", "Sequential") and random.random() < 0.2:
        small = case.n <= 32 and not case.proj
        options["adjoint"] = random.choice(("sequential", "mgrit", "scan") if small else ("sequential", "mgrit"))
    if kind not in ("auto", "Sequential") and random.random() < 0.1:
        options["tol"] = random.choice((1e-3, 1e-4))
    return kind, {name: value for name, value in options.items() if value is not None}


def _bounded(case: Case, work: float, limits: Limits, shorten: bool) -> Case:
    """The same within the limits: with fewer steps if `shorten`, else with fewer sequences and units."""
    most = limits.steps // (case.layers * case.directions)
    python = case.cell not in TWINS
    if python:
        most = min(most, max(1, limits.loop // (case.layers * case.directions)))
    if case.solver in STEPWISE and case.cell in USER_CELLS:
        case = replace(case, n=min(case.n, STEPWISE_UNITS_OWN))
    if case.solver in (*STEPWISE, "MGRIT"):
        slow = 200 if case.solver in ("Picard", "Jacobi") else 600
        most = min(most, max(1, slow // (case.layers * case.directions)))
    if case.solver in DENSE or "scan" in case.options.values() or "newton" in case.options.values():
        n = min(case.n, DENSE_UNITS_OWN if case.cell in USER_CELLS else DENSE_UNITS)
        case = replace(case, n=n, proj=min(case.proj, n - 1), B=min(case.B, 8))
        state = case.n * (2 if case.cell == "LSTM" else 1)
        most = min(most, max(1, int(work * 4 / (max(case.B, 1) * state**3))))
    case = replace(case, T=min(case.T, most))
    if shorten and case.work > work:
        case = replace(case, T=max(min(case.T, 4), int(case.T * work / case.work)))
    if case.work > work:
        case = replace(case, B=min(case.B, max(1, int(case.B * work / case.work))))
    if case.work > work:
        most = max(min(case.n, 3), int(case.n * (work / case.work) ** 0.5))
        n = max(width for width in WIDTHS if width <= most)  # few widths: kernels are compiled for each
        case = replace(case, n=n, inputs=min(case.inputs, n), proj=min(case.proj, n - 1))
    return replace(case, T=max(1, int(case.T * work / case.work))) if case.work > work else case
