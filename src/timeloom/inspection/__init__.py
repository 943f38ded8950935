"""What solvers do on a model: `timeloom.inspect`."""

from timeloom.inspection.trials import Inspection, inspect

__all__ = ["Inspection", "inspect"]
