"""Why a step cannot be compiled."""

ROWS_MIX = "rows that mix"
"""Beginning of the reason if a trace shows that rows of a batch are not independent."""
BRANCHES = "data-dependent control flow"
"""Beginning of the reason if values decide what a step does: those of one row may decide for others."""


class NotFused(Exception):
    """A step cannot be compiled; the message says why."""
