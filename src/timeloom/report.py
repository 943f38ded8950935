"""What a solve did, in numbers and in words, and the error raised on divergence if the user asked for one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

BY_TORCH = "run by torch's own layer"
"""Words in the reason of a report that mark a run by torch's own layer."""


@dataclass(frozen=True)
class GradientCheck:
    """A gradient compared with the exact one: of the recurrent weights, or of the states if a cell hides weights."""

    error: float
    """Length of the difference over the length of the exact gradient."""
    cosine: float
    """Cosine of the angle between the two."""
    tolerance: float | None = None
    """Largest error to accept, if one was given."""

    @property
    def too_far(self) -> bool:
        return self.tolerance is not None and not self.error <= self.tolerance


@dataclass(frozen=True)
class SolveReport:
    """What one solve decided, what it cost and how precise it is, with its certificate."""

    solver: str
    """The method that ran: `sequential`, `shooting[none|diag|secant|lowrank|newton]`, `mgrit[cycle, levels]`, or the
    solver's name."""
    chunk: int
    """Steps in a chunk; T for a sequential run."""
    iterations: int
    """Number of sweeps over all unconverged chunks, not counting a warm-up; for multigrid, of cycles."""
    residuals: tuple[float, ...]
    """Largest jump between a chunk's end and the next chunk's start after each sweep (or cycle), relative to the
    state's scale."""
    tolerance: float
    converged: bool
    """Whether the states meet the tolerance, by the sweeps or by the sequential fallback."""
    fell_back: bool
    """Whether the sweeps were given up, and everything after the exact prefix was run sequentially."""
    contraction: float | None
    """Last measured factor by which a sweep shrank the residual; None if there were fewer than two sweeps."""
    seconds: float
    reason: str = ""
    """Why this solver, chunk and correction, and why it stopped, in words."""
    warmup: int = 0
    """Steps of each chunk that the warm-up ran to guess the chunk starts."""
    certificate: Tensor | None = None
    """An upper bound of the residual, on the GPU: set if the call was captured into a CUDA graph, where nothing can be
    read."""
    error_estimate: float | None = None
    """Estimated error of the chunk starts against a sequential run, relative to the state's scale. It follows from the
    jumps, the known transfers and the contraction of the sweeps (see `timeloom.solve.residual`) and leaves out
    rounding. None for methods that do not estimate it (multigrid, ranks)."""
    levels: tuple[tuple[float, ...], ...] = ()
    """Multigrid: for every cycle, the relative residual left on each level but the coarsest, finest first; only that of
    the fine level if relaxation was enough."""
    advice: str = ""
    """Multigrid that did not converge: what held it up, and what to try."""
    gradient: GradientCheck | None = None
    """How far the gradient is from the exact one, if the solver checked it (`check_gradient_every`)."""
    backward: SolveReport | None = None
    """The adjoint solve's report, once the backward pass has run."""

    @classmethod
    def sequential(cls, steps: int, reason: str, tolerance: float = 0.0, seconds: float = 0.0) -> SolveReport:
        """The report of a sequential run, which is exact."""
        return cls("sequential", steps, 1, (), tolerance, True, False, None, seconds, reason, error_estimate=0.0)

    @classmethod
    def by_torch(cls, steps: int, reason: str) -> SolveReport:
        """The report of a run by torch's own layer, with the reason for it."""
        return cls.sequential(steps, f"{reason}; {BY_TORCH}")

    @property
    def ran_in_torch(self) -> bool:
        """Whether torch's own layer ran."""
        return BY_TORCH in self.reason

    @property
    def certified(self) -> bool:
        """Whether the tolerance was met, also by the backward pass if that has run.

        For a captured CUDA graph this refers to the last replay, and reading it waits for the GPU.
        """
        met = self.converged if self.certificate is None else float(self.certificate) <= self.tolerance
        return met and (self.backward is None or self.backward.certified)

    @property
    def unit(self) -> str:
        """The name of what `iterations` counts, singular or plural."""
        name = "cycle" if self.levels else "sweep"
        return name if self.iterations == 1 else f"{name}s"

    def __str__(self) -> str:
        state = "NOT converged" if not self.converged else "fell back to sequential" if self.fell_back else "converged"
        residual = f", residual {self.residuals[-1]:.1e} (tolerance {self.tolerance:.0e})" if self.residuals else ""
        if self.residuals and self.error_estimate is not None:
            residual += f", error about {self.error_estimate:.1e}"
        if self.certificate is not None:
            state, residual = "not read yet", f" (tolerance {self.tolerance:.0e})"
        factor = f", last factor {self.contraction:.2g}" if self.levels and self.contraction is not None else ""
        text = f"{self.solver}, chunk {self.chunk}, {self.iterations} {self.unit}: {state}{residual}{factor}"
        if self.reason:
            text += f"; {self.reason}"
        if self.gradient is not None:
            text += f"; gradient off by {self.gradient.error:.1e}, cosine {self.gradient.cosine:.6f}"
        if self.advice:
            text += f". {self.advice}"
        return text if self.backward is None else f"{text}\n  backward: {self.backward}"


def contraction(residuals: list[float]) -> float | None:
    """The factor by which the last sweep shrank the residual; None if there is no earlier residual above zero."""
    return residuals[-1] / residuals[-2] if len(residuals) > 1 and residuals[-2] > 0 else None


class ConvergenceError(RuntimeError):
    """Raised if the sweeps miss the tolerance and `on_divergence="raise"` was given; `report` says what happened."""

    def __init__(self, report: SolveReport) -> None:
        shooting = report.solver.startswith("shooting")
        other = "longer chunks, correction='newton'" if shooting else "solver='shooting' or 'elk'"
        advice = report.advice or f"Use {other}, or a larger max_iters."
        super().__init__(
            f"the {report.solver} solver did not converge: after {report.iterations} {report.unit} of "
            f"{report.chunk}-step chunks the relative residual is "
            f"{report.residuals[-1] if report.residuals else float('nan'):.2e}, the tolerance {report.tolerance:.0e}. "
            f"{advice} With on_divergence='sequential' it is finished exactly, one step after the other."
        )
        self.report = report

    def __reduce__(self) -> tuple[type[ConvergenceError], tuple[SolveReport]]:
        return type(self), (self.report,)


def describe(report: SolveReport, length: int) -> str:
    """What one solve over `length` steps did, and why, in words."""
    chunks = -(-length // report.chunk)
    if report.solver == "sequential" or chunks == 1:
        by = "" if report.solver == "sequential" else f" ({report.solver})"
        text = f"ran {length:,} steps in one chunk{by}"
    else:
        sweeps = "1 sweep" if report.iterations == 1 else f"{report.iterations} sweeps"
        text = f"ran {length:,} steps in parallel over {chunks:,} chunks of {report.chunk}, {sweeps} of {report.solver}"
        if report.residuals:
            text += (
                f"; the largest jump left between two chunks is {report.residuals[-1]:.1e} "
                f"(tolerance {report.tolerance:.0e})"
            )
        if report.residuals and report.error_estimate is not None and math.isfinite(report.error_estimate):
            text += f", and states are off by about {report.error_estimate:.1e}"
        if report.fell_back:
            text += "; the sweeps did not contract, so the rest was run in one chunk"
    return f"{text}. Why: {report.reason}." if report.reason else f"{text}."


def of_reports(reports: Iterable[tuple[str, SolveReport]], length: int) -> list[tuple[str, str]]:
    """Pairs of layer and description, forward and backward, for reports that are given with the name of their layer."""
    told = []
    for where, report in reports:
        told.append((f"{where} forward", describe(report, length)))
        if report.backward is not None:
            told.append((f"{where} backward", describe(report.backward, length)))
    merged = _by_text(told)
    return merged if len(merged) > 1 or len(told) < 3 else [("every layer", merged[0][1])]


def _by_text(told: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge equal descriptions: each text once, with all the layers that it describes."""
    places: dict[str, list[str]] = {}
    for where, text in told:
        places.setdefault(text, []).append(where)
    return [(", ".join(found), text) for text, found in places.items()]
