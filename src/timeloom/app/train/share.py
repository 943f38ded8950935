"""What a process has of a batch: some of its series, and of those perhaps a slice in time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from timeloom.app.data import Batch
from timeloom.app.train.model import SequenceModel
from timeloom.distributed import last_over_time, mean_over_time, sum_over_time


@dataclass(frozen=True)
class Part:
    """A slice in time of series whose other steps are on other ranks."""

    begin: int
    mesh: DeviceMesh

    def last(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """The last real step of every series, `(T_local, B, n)` to `(B, n)`, the same on all time ranks."""
        if lengths is None:
            return last_over_time(x, self.mesh)
        places = lengths.to(x.device) - 1 - self.begin
        here = (places >= 0) & (places < len(x))
        found = x[places.clamp(0, len(x) - 1), torch.arange(x.shape[1], device=x.device)]
        return sum_over_time(found.masked_fill(~here.unsqueeze(-1), 0), self.mesh)

    def mean(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """The mean over the real steps of every series, the same on all time ranks."""
        if lengths is None:
            return mean_over_time(x, self.mesh)
        ends = lengths.to(x.device)
        real = torch.arange(self.begin, self.begin + len(x), device=x.device).unsqueeze(1) < ends
        return sum_over_time((x * real.unsqueeze(-1)).sum(dim=0), self.mesh) / ends.unsqueeze(-1)


@dataclass(frozen=True)
class Share:
    """What a process has of a batch."""

    batch: Batch | None
    """None where a batch has fewer series than there are data ranks."""
    part: Part | None
    """None where this process has all steps."""
    labels: int
    """Classes or numbers to learn in the whole batch, on all ranks."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Share:
        return Share(None if self.batch is None else self.batch.to(device, dtype), self.part, self.labels)

    def answers(self, model: SequenceModel, batch: Batch) -> Tensor:
        if self.part is not None:
            return model.answers_of(batch.inputs, batch.lengths, self.part)
        answers: Tensor = model(batch.inputs, batch.lengths)
        return answers
