"""Why a step cannot be compiled."""

ROWS_MIX = "rows that mix"
"""How the reason begins where a trace shows that rows of a batch are not independent."""
BRANCHES = "data-dependent control flow"
"""How it begins where values decide what a step does: those of one row may decide for others."""


class NotFused(Exception):
    """A step is outside of what can be compiled; the message says what stands in the way."""
