"""What the solver did in a training step."""

from __future__ import annotations

from dataclasses import dataclass

from timeloom.app.train.model import SequenceModel
from timeloom.inspection.trials import reports_of
from timeloom.report import SolveReport


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
    parallel: int
    """Solves of the forward pass that cut time into chunks."""

    @classmethod
    def of(cls, model: SequenceModel) -> Solved:
        forward = [report for _, report in reports_of(model)]
        backward = [report.backward for report in forward if report.backward is not None]
        both = forward + backward
        return cls(
            max((r.iterations for r in forward), default=0),
            max((r.iterations for r in backward), default=0),
            max((r.residuals[-1] for r in both if r.residuals), default=0.0),
            sum(r.fell_back for r in both),
            sum(_in_chunks(r) for r in forward),
        )


def _in_chunks(report: SolveReport) -> bool:
    return report.solver != "sequential" and bool(report.residuals or report.warmup)
