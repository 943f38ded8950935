"""Ordinary differential equations `dy/dt = f(t, y)`, solved parallel in time."""

from timeloom.ode.odeint import odeint

__all__ = ["odeint"]
