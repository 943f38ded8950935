"""What solvers do on a model: `timeloom.inspect`."""

from timeloom.inspection.outcome import Inspection
from timeloom.inspection.trials import inspect

__all__ = ["Inspection", "inspect"]
