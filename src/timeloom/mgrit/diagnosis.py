"""Why cycles stall, in words: which level is to blame, and what to try."""

from __future__ import annotations

from timeloom.mgrit.grid import Coarsening

PATIENCE = 3
"""Cycles that may fail to halve the residual before the solve counts as not contracting."""
LITTLE = 0.5
"""A coarse level is the bottleneck if a visit leaves more than this share of its residual."""


def stalled(residuals: list[float]) -> str:
    """Why to give up if residuals no longer shrink, else an empty string."""
    if len(residuals) > PATIENCE and not residuals[-1] < 0.5 * residuals[-1 - PATIENCE]:
        return f"gave up: {PATIENCE} cycles did not halve the residual"
    return ""


def diagnose(levels: list[tuple[float, ...]], coarsening: Coarsening, relaxations: tuple[int, ...], kind: str) -> str:
    """Advice after cycles that did not converge, from the residual that each cycle left on each level."""
    if len(levels) < 2 or levels[-1][0] < LITTLE * levels[-2][0]:
        return "It was still converging: give it more cycles (cycles=None, a larger max_iters)."
    before, last = levels[-2][0], levels[-1]
    for level, left in enumerate(last[1:], start=1):
        handed = max(before, 1e-300) if level == 1 else max(last[level - 1], 1e-300)
        if left > LITTLE * handed:
            more = "cycle='F'" if kind == "V" else "fewer levels"
            stronger = "FCF" if relaxations[level] == 0 else "F" + "CF" * (relaxations[level] + 1)
            return (
                f"Level {level} is to blame: of a residual of {handed:.1e} a visit left {left:.1e}. Try "
                f"relaxation='{stronger}' there, {more}, or a smaller coarsening factor than "
                f"{coarsening.factors[level]} on it."
            )
    return _blame_first(before, last[0], coarsening, relaxations)


def _blame_first(before: float, after: float, coarsening: Coarsening, relaxations: tuple[int, ...]) -> str:
    """Advice if the coarse levels converged: then a coarse step does not resemble the steps that it replaces."""
    factor = after / before if before > 0 else float("inf")
    options = [f"relaxation='F{'CF' * (relaxations[0] + 1)}'"]
    if coarsening.coarse == "implicit":
        options.append("coarse='frozen'")
    if coarsening.inputs == "inject":
        options.append("coarse_inputs='mean'")
    options.append(f"another first coarsening factor than {coarsening.factors[0]} (longer chunks forget more)")
    return (
        f"Level 0 is to blame: the last cycle changed its residual by a factor of {factor:.2g}, so a coarse step over "
        f"{coarsening.factors[0]} steps does not resemble this network. Try {', '.join(options)}; a network that does "
        f"not contract has no faster way than one step after the other."
    )
