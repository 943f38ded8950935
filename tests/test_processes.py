"""Layers in other processes: DataLoader's workers, children by fork and spawn, weights in shared memory."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import timeloom as tl
from timeloom.solvers import Shooting

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks"),
]


class Lines(Dataset[Tensor]):
    """What a worker makes by running a layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = tl.GRU(2, 8, solver=Shooting(chunk=16))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.layer(torch.linspace(-1, index, 200).view(100, 2))[0]
        return found


def train(layer: Any, steps: int = 2) -> list[Tensor]:
    """Weights after a few steps of training on a fixed input."""
    torch.manual_seed(1)
    x = torch.randn(64, 2, 2)
    for _ in range(steps):
        layer.zero_grad()
        layer(x)[0].square().sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.01 * parameter.grad
    return [parameter.detach().clone() for parameter in layer.parameters()]


def _child(layer: Any, answers: Any) -> None:
    torch.set_num_threads(1)  # after a fork more would wait for ever, in torch's own layers too
    answers.put([weight.numpy() for weight in train(layer)])


def test_dataloader_workers() -> None:
    data = Lines()
    right = torch.stack([data[index] for index in range(len(data))])  # kernels have run before the fork
    found = torch.cat(list(DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")))
    torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_trains_weights_in_shared_memory(method: str) -> None:
    """As torch.multiprocessing does: what the child has learned is in the parent's layer, which runs on with it."""
    torch.manual_seed(0)
    solver = Shooting(chunk=16)
    layer, alone = tl.LSTM(2, 8, solver=solver).share_memory(), tl.LSTM(2, 8, solver=solver)
    alone.load_state_dict(layer.state_dict())
    layer(torch.randn(64, 2, 2))  # what is remembered of this call, the child must not take for its own
    right = train(alone)
    context = mp.get_context(method)
    answers = context.SimpleQueue()
    child = context.Process(target=_child, args=(layer, answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    told = answers.get()
    for weight, at_child, expected in zip(layer.parameters(), told, right, strict=True):
        torch.testing.assert_close(weight.detach(), expected)
        torch.testing.assert_close(torch.from_numpy(at_child), expected)
    x = torch.randn(50, 2, 2)
    torch.testing.assert_close(layer(x)[0], alone(x)[0])
