"""What a solve did, and the error raised when it was told not to hide a failure."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SolveReport:
    """What was decided, what it took, and what was reached: the certificate of one solve."""

    solver: str
    """The method that ran: `sequential`, `shooting[none|diag|newton]`, or the solver's own name."""
    chunk: int
    """Steps in a chunk; T for a sequential run."""
    iterations: int
    """Sweeps over all unconverged chunks; a warm-up over part of each chunk is not counted."""
    residuals: tuple[float, ...]
    """Largest jump between a chunk's end and the next chunk's start after each sweep, relative to the state's scale."""
    tolerance: float
    converged: bool
    """Whether the states meet the tolerance, by the sweeps or by the sequential fallback."""
    fell_back: bool
    """Whether the sweeps gave up and the rest, after the exact prefix, was run sequentially."""
    contraction: float | None
    """Last measured factor by which a sweep shrank the residual; None where fewer than two were needed."""
    seconds: float
    reason: str = ""
    """Why this solver, chunk and correction, and why it stopped, in words."""
    warmup: int = 0
    """Steps of each chunk that the warm-up ran to guess the chunk starts."""
    certificate: Tensor | None = None
    """A bound of the residual as a number on the GPU, where a CUDA graph was captured and it could not be read."""
    backward: SolveReport | None = None
    """The adjoint solve's report, once the backward pass has run."""

    @classmethod
    def sequential(cls, steps: int, reason: str, tolerance: float = 0.0, seconds: float = 0.0) -> SolveReport:
        """Of a run of one step after the other: exact, nothing to fit together."""
        return cls("sequential", steps, 1, (), tolerance, True, False, None, seconds, reason)

    def __str__(self) -> str:
        state = "fell back to sequential" if self.fell_back else "converged" if self.converged else "NOT converged"
        residual = f", residual {self.residuals[-1]:.1e} (tolerance {self.tolerance:.0e})" if self.residuals else ""
        text = f"{self.solver}, chunk {self.chunk}, {self.iterations} sweeps: {state}{residual}"
        if self.reason:
            text += f"; {self.reason}"
        return text if self.backward is None else f"{text}\n  backward: {self.backward}"


class ConvergenceError(RuntimeError):
    """The sweeps did not meet the tolerance and `on_divergence="raise"` was asked for; `report` says what happened."""

    def __init__(self, report: SolveReport) -> None:
        shooting = report.solver.startswith("shooting")
        other = "longer chunks, correction='newton'" if shooting else "solver='shooting' or 'elk'"
        super().__init__(
            f"the {report.solver} solver did not converge: after {report.iterations} sweeps of {report.chunk}-step "
            f"chunks the relative residual is {report.residuals[-1] if report.residuals else float('nan'):.2e}, the "
            f"tolerance {report.tolerance:.0e}. Use {other}, a larger max_iters, or on_divergence='sequential' to "
            f"finish exactly without it."
        )
        self.report = report

    def __reduce__(self) -> tuple[type[ConvergenceError], tuple[SolveReport]]:
        return type(self), (self.report,)
