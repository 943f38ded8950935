"""Two training runs over ranks that resume from their last checkpoints: `torchrun … rank_training.py PLAIN KILLED`.

In the middle of the second one, rank 1 of the first attempt is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import timeloom as tl
from timeloom.distributed import TimeParallel, mean_over_time, shard, time_mesh, time_parallel
from timeloom.solvers import Shooting

STEPS, KILLED_AT = 6, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = tl.GRU(3, 8, num_layers=2, solver=Shooting(chunk=8, warmup=4))
        self.read = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.read(self.gru(x)[0])
        return y


def train(folder: Path, die: bool) -> None:
    mesh = time_mesh(device="cpu")
    torch.manual_seed(0)
    model = TimeParallel(Net().double(), mesh)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    first, kept = 0, folder / "checkpoint.pt"
    if kept.exists():
        found = torch.load(kept)
        model.load_state_dict(found["model"])
        optimiser.load_state_dict(found["optimiser"])
        first = found["step"] + 1
    with time_parallel(mesh):
        for step in range(first, STEPS):
            x = torch.randn(41, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            optimiser.zero_grad()
            y = model(shard(x, mesh))
            if die and step == KILLED_AT and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            mean_over_time((y - shard(x.roll(1, 0), mesh)).square(), mesh).mean().backward()
            optimiser.step()
            if dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}
                torch.save(state, folder / "new.pt")
                (folder / "new.pt").replace(kept)  # never half a checkpoint
                with (folder / "log.txt").open("a") as log:
                    log.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']}:{step}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), die=False)
    train(Path(sys.argv[2]), die=True)
    dist.destroy_process_group()
