"""Train a GRU on sequences that are split in time over many processes; each makes, holds and runs its own steps only.

torchrun --nproc-per-node 2 examples/many_ranks.py
torchrun --nproc-per-node 4 examples/many_ranks.py 2     # two batches, each over two processes
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import timeloom as tl
from timeloom.distributed import TimeParallel, mean_over_time, slice_of, time_mesh

STEPS, EPOCHS = 4000, 30


class Follower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru, self.read = tl.GRU(1, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.gru(x)[0])


mesh = time_mesh(int(sys.argv[1]) if len(sys.argv) > 1 else None)  # processes that share a sequence; all by default
mine = slice_of(STEPS, mesh)  # this process's steps
clock = torch.arange(mine.start, mine.stop)[None, :, None] / 20
torch.manual_seed(0)  # the same weights on all processes
net = Follower(32)
model = nn.parallel.DistributedDataParallel(TimeParallel(net, mesh), process_group=mesh.get_group("data"))
optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(EPOCHS):
    generator = torch.Generator().manual_seed(epoch * 1000 + mesh.get_local_rank("data"))
    phase, pace = torch.rand(2, 16, 1, 1, generator=generator)  # another batch on each data rank
    angle = 6 * phase + (0.5 + pace) * clock
    error = model(angle.sin()) - angle.cos()
    loss = mean_over_time(error.square(), mesh, dim=1).mean()  # the same on all time ranks
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if dist.get_rank() == 0 and epoch % 10 == 9:
        print(f"epoch {epoch + 1}: loss {loss:.5f}; {net.gru.reports[0]}")
dist.destroy_process_group()
