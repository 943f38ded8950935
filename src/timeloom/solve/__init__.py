"""A solve: problem, plan, sweeps, certificate, tape."""
