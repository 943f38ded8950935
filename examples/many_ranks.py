"""Train a GRU on sequences that are split in time over many processes.

Each process makes, holds and runs its own steps only; states and gradients are those of one process.

    torchrun --nproc-per-node 2 examples/many_ranks.py
    torchrun --nproc-per-node 4 examples/many_ranks.py --time 2     # two batches, each over two processes
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import timeloom as tl
from timeloom.distributed import TimeParallel, mean_over_time, slice_of, time_mesh


class Follower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru, self.read = tl.GRU(1, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.gru(x)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000, help="length of a sequence")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--time", type=int, help="processes that share a sequence; all by default")
    options = parser.parse_args()

    mesh = time_mesh(options.time)
    mine = slice_of(options.steps, mesh)  # this process's steps
    clock = torch.arange(mine.start, mine.stop)[None, :, None] / 20
    torch.manual_seed(0)  # the same weights on all processes
    model = TimeParallel(Follower(32), mesh)
    model = DistributedDataParallel(model, process_group=mesh.get_group("data"))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(options.epochs):
        generator = torch.Generator().manual_seed(epoch * 1000 + mesh.get_local_rank("data"))
        phase, pace = torch.rand(2, 16, 1, 1, generator=generator)  # another batch on each data rank
        angle = 6 * phase + (0.5 + pace) * clock
        error = model(angle.sin()) - angle.cos()
        loss = mean_over_time(error.square(), mesh, dim=1).mean()  # the same on all time ranks
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if dist.get_rank() == 0 and epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {loss:.5f}; {model.module.module.gru.reports[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
