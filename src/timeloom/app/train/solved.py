"""What the solver did in a training step."""

from __future__ import annotations

from dataclasses import dataclass

from timeloom.app.train.model import SequenceModel
from timeloom.inspection.trials import reports_of
from timeloom.report import SolveReport
from timeloom.solve.recurrence import BEGUN


@dataclass(frozen=True)
class Solved:
    """What the solver did in one step, over all layers."""

    sweeps: int
    """Most sweeps that a layer's forward pass took."""
    backward_sweeps: int
    residual: float
    """Largest jump left."""
    fallbacks: int
    """Solves that were finished sequentially."""
    chunks: int
    """Chunks of time that ran side by side, the most of all layers; 1 where none was cut."""
    warm: bool
    """Whether a layer began at the states of the epoch before."""

    @classmethod
    def of(cls, model: SequenceModel, steps: int) -> Solved:
        """What the last call over `steps` steps did."""
        forward = [report for _, report in reports_of(model)]
        backward = [report.backward for report in forward if report.backward is not None]
        both = forward + backward
        return cls(
            max((r.iterations for r in forward), default=0),
            max((r.iterations for r in backward), default=0),
            max((r.residuals[-1] for r in both if r.residuals), default=0.0),
            sum(r.fell_back for r in both),
            max((chunks_of(r, steps) for r in both), default=1),
            any(BEGUN in r.reason for r in forward),
        )

    def words(self) -> str:
        """What ran, in a few words."""
        if self.chunks == 1:
            return "one chunk"
        back = f" (finished in one chunk {self.fallbacks} times)" if self.fallbacks else ""
        return f"in parallel over {self.chunks:,} chunks, sweeps {self.sweeps}+{self.backward_sweeps}{back}"


def chunks_of(report: SolveReport, steps: int) -> int:
    """Chunks that ran side by side."""
    cut = report.solver != "sequential" and bool(report.residuals or report.warmup)
    return -(-steps // report.chunk) if cut else 1
