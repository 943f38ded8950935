"""What the pieces measure: sizes and regimes, with the goals set for an H200."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from benchmarks.cases import LONG_MEMORY, NEVER_SLOWER, STRONG, TRAINED, Case, Regime

LENGTH = 16384
WIDTHS = (16, 32, 64, 128, 256, 512, 1024)
REGIMES: tuple[Regime, ...] = (*LONG_MEMORY, TRAINED, *STRONG[:2])
LONG_MEMORY_GOAL, HALF_GOAL = 20.0, 250.0

GRID_LENGTHS = (64, 256, 1024, 4096, 16384, 65536)
GRID_BATCHES = (1, 8, 64, 512)
GRID_HIDDENS = (8, 32, 128, 512, 1024)
LARGEST_STATES = 2**30
"""Bytes of one float32 trajectory beyond which a point is left out of the grid."""
SLOWEST_CUDNN_STEP = 1.5
"""Seconds of a cuDNN step, as estimated, beyond which a point is left out of the grid."""
PERSISTENT = 128
"""Units up to which cuDNN runs all steps in one kernel."""


def goal(batch: int, hidden: int) -> float:
    """The goal for the speedup of forward + backward over cuDNN at T = 16,384 in float32."""
    if batch == 1:
        return 60.0 if hidden <= PERSISTENT else 100.0
    return 40.0 if batch == 16 and hidden <= PERSISTENT else NEVER_SLOWER


def headline() -> list[Case]:
    """T = 16,384 in all widths, LSTMs and RNNs, and shorter sequences; the slowest last."""
    alone, many = ([Case(LENGTH, batch, hidden, goal=goal(batch, hidden)) for hidden in WIDTHS] for batch in (1, 16))
    narrow = sum(hidden <= PERSISTENT for hidden in WIDTHS)
    lstms = [Case(LENGTH, 1, hidden, "LSTM") for hidden in (32, 64, 128, 256)]
    plain = [Case(LENGTH, 1, hidden, "RNN") for hidden in (32, 128)]
    others = ((2048, 64, 64), (2048, 64, 512), (1024, 1, 64), (1024, 1, 256), (4096, 256, 32))
    return [*alone, *many[:narrow], *lstms, *plain, *(Case(*sizes) for sizes in others), *many[narrow:]]


def regimes() -> list[Case]:
    """Long memory, trained weights, and strong ones that need not contract; the slowest last."""
    goals = dict.fromkeys(LONG_MEMORY, LONG_MEMORY_GOAL)
    alone = [
        Case(LENGTH, 1, hidden, regime=regime, goal=goals.get(regime, NEVER_SLOWER))
        for regime in REGIMES
        for hidden in WIDTHS[1:]
    ]
    many = [
        Case(LENGTH, 16, hidden, regime=regime, goal=goals[regime]) for regime in LONG_MEMORY for hidden in (32, 128)
    ]
    calm = [case for case in alone if case.regime not in STRONG]
    return calm + many + [case for case in alone if case.regime in STRONG]


def half() -> list[tuple[Case, str]]:
    """Default weights in bfloat16 and float16."""
    sizes = (("bfloat16", WIDTHS[1:]), ("float16", (32, 128, 512)))
    return [
        (Case(LENGTH, 1, hidden, goal=HALF_GOAL if dtype == "bfloat16" else NEVER_SLOWER), dtype)
        for dtype, widths in sizes
        for hidden in widths
    ]


def grid() -> tuple[list[Case], dict[str, str]]:
    """Every point that fits, and why the others are left out."""
    points = (Case(*sizes) for sizes in product(GRID_LENGTHS, GRID_BATCHES, GRID_HIDDENS))
    reasons = {case: _unfit(case) for case in points}
    kept = [case for case, reason in reasons.items() if reason is None]
    return kept, {case.name: reason for case, reason in reasons.items() if reason is not None}


def _unfit(case: Case) -> str | None:
    if 4 * case.length * case.batch * case.hidden > LARGEST_STATES:
        return "trajectory over 1 GiB"
    if cudnn_seconds(case) > SLOWEST_CUDNN_STEP:
        return f"cuDNN would take over {SLOWEST_CUDNN_STEP:g} s"
    return None


def cudnn_seconds(case: Case) -> float:
    """Rough time of forward + backward in cuDNN on an H200, fitted by eye to measured steps."""
    step = 1.2e-6 + 45e-9 * case.batch
    if case.hidden > PERSISTENT:
        step = 22e-6 + 0.4e-9 * case.batch * case.hidden
    return case.length * step


def solvers() -> list[Case]:
    """Sizes at which every solver can be tried."""
    return [Case(LENGTH, 1, hidden) for hidden in (8, 32, 128)]


def rivals() -> list[Case]:
    """Sizes at which other libraries can run."""
    return [Case(LENGTH, batch, hidden) for batch in (1, 16) for hidden in (16, 32, 64)]


def short_rivals() -> list[Case]:
    """Lengths at which a loop over time can be compiled at all."""
    return [replace(Case(LENGTH, 1, 32), length=length) for length in (128, 512)]
