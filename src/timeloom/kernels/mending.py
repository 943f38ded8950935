"""Certificates that the host cannot read in time, those of CUDA graphs: the graph itself runs in one chunk what is not
certified, so that its results are exact whatever the certificate is.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from timeloom.kernels.host_certificate import is_heard, tell
from timeloom.torch_state import streams

if TYPE_CHECKING:
    from timeloom.kernels.layer import Cutting


class Unless(NamedTuple):
    """A certificate on the device, and its limit: what is launched with it sweeps where it is missed, and else nothing.

    rows: of the sweeps that it is of, whose kernel is there.
    """

    certificate: Tensor
    limit: float
    rows: int

    @property
    def limit_on_device(self) -> float:
        """The largest number of single precision that is within the limit. Told without torch, whose default device and
        dtype are the user's.
        """
        (bits,) = struct.unpack("<i", struct.pack("<f", self.limit))
        nearest, below = struct.unpack("<ff", struct.pack("<ii", bits, bits - 1))
        return float(nearest if nearest <= self.limit else below)

    @property
    def told(self) -> Tensor:
        """The certificate where the host gets to know it, or where it is met; in a graph of a user's zero where one
        chunk has taken the place of what was not certified.
        """
        if is_heard():
            return self.certificate
        return torch.where(self.certificate <= self.limit_on_device, self.certificate, 0.0)


def unless(error: Tensor | float, limit: float, rows: int) -> Unless | None:
    """What the launches behind a certificate are given to mend what is not certified; None where the host looks."""
    if not isinstance(error, Tensor) or limit == math.inf or not in_a_graph(error.device):
        return None
    return Unless(error, limit, rows)


class Retry(NamedTuple):
    """A second sweep of the same chunks if a certificate is missed: `sweep(missed, warmup)` returns its certificate."""

    sweep: Callable[[Unless, int], Tensor]
    cutting: Cutting

    @staticmethod
    def of(sweep: Callable[[Unless, int], Tensor], cutting: Cutting | None) -> Retry | None:
        """None if the plan has no second sweep."""
        return None if cutting is None else Retry(sweep, cutting)


def mended(
    error: Tensor | float, given: Unless | None, mend: Callable[[Unless], None], retry: Retry | None = None
) -> Tensor | float:
    """Report a certificate to the host, launch behind it what mends a missed one if `given`, and return it.

    With a second sweep to `retry` first, two certificates are reported; the second is zero if the first is met.
    """
    if given is None or retry is None:
        tell(error, mended=given is not None)
        if given is None:
            return error
        mend(given)
        return given.told
    met = given.certificate <= given.limit_on_device
    second = torch.where(met, 0.0, retry.sweep(given, retry.cutting.warmup))
    tell(torch.stack([given.certificate, second]), mended=True)
    last = Unless(second, retry.cutting.limit, given.rows)
    mend(last)
    return given.certificate if is_heard() else torch.where(met, given.certificate, last.told)


def in_a_graph(device: torch.device) -> bool:
    """Whether launches on a device go into a CUDA graph."""
    return streams.capturing(device)
