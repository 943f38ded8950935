"""Experiments with committed results; each module runs by `python -m experiments.…` and says what it needs."""
