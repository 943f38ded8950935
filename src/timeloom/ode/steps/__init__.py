"""Time steps: the equations between neighbouring points of a trajectory; one file each."""

from timeloom.ode.steps.base import Evaluation, Step, Transfers
from timeloom.ode.steps.linearised import Linearised
from timeloom.ode.steps.midpoint import ImplicitMidpoint
from timeloom.ode.steps.rk4 import RK4
from timeloom.ode.steps.simpson import HermiteSimpson

STEPS: dict[str, Step] = {step.name: step for step in (RK4(), ImplicitMidpoint(), HermiteSimpson(), Linearised())}

__all__ = ["RK4", "STEPS", "Evaluation", "Step", "Transfers"]
