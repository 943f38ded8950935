"""Why a step cannot be compiled."""


class NotFused(Exception):
    """A step is outside of what can be compiled; the message says what stands in the way."""
