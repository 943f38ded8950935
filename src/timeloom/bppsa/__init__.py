"""Back-propagation through a chain of layers as a scan over transposed Jacobians (BPPSA)."""

from timeloom.bppsa.backward import chain_backward

__all__ = ["chain_backward"]
