"""Passes in CUDA graphs, whose certificate the host cannot check in time: the graph redoes uncertified work itself.

It reruns time in one chunk if the certificate is missed, so that its results are exact whatever the certificate is.
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
    """A guard for launches: a certificate on the device, and the limit above which sweeps launched with it run at all.

    rows: rows of the certified sweep; a user's cell is rerun by the same kernel, which is compiled already.
    met: the certificate if it is met, else zero, where the kernel that measured it has told this, too.
    """

    certificate: Tensor
    limit: float
    rows: int
    met: Tensor | None = None

    @property
    def limit_on_device(self) -> float:
        return largest_within(self.limit)

    @property
    def told(self) -> Tensor:
        """The certificate where the host reads it or it is met; zero where a rerun in a user's graph took its place."""
        if is_heard():
            return self.certificate
        if self.met is not None:
            return self.met
        return torch.where(self.certificate <= self.limit_on_device, self.certificate, 0.0)


def largest_within(limit: float) -> float:
    """The largest float32 within the limit, found without torch, whose default device and dtype are the user's."""
    if limit == math.inf:
        return limit
    (bits,) = struct.unpack("<i", struct.pack("<f", limit))
    nearest, below = struct.unpack("<ff", struct.pack("<ii", bits, bits - 1))
    return float(nearest if nearest <= limit else below)


def unless(error: Tensor | float, limit: float, rows: int, met: Tensor | None = None) -> Unless | None:
    """The guard for reruns behind this certificate in a CUDA graph; None where the host checks it."""
    if not isinstance(error, Tensor) or limit == math.inf or not in_a_graph(error.device):
        return None
    return Unless(error, limit, rows, met)


class Retry(NamedTuple):
    """A second sweep of the same chunks if a certificate is missed: `sweep(missed, warmup)` returns its certificate."""

    sweep: Callable[[Unless, int], Tensor]
    cutting: Cutting

    @staticmethod
    def of(sweep: Callable[[Unless, int], Tensor], cutting: Cutting) -> Retry | None:
        """None if the plan of the first sweep has no second one, or not for this graph."""
        if cutting.retry is None or not (is_heard() or cutting.has_missed):
            return None
        return Retry(sweep, cutting.retry)


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
    """Whether launches on a device are being captured into a CUDA graph."""
    return streams.capturing(device)
