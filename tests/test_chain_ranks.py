"""`chain_backward` with the products of every level shared by processes, against autograd in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import launch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import timeloom as tl
from timeloom.bppsa import backward

pytestmark = pytest.mark.usefixtures("one_thread")


def model_of() -> nn.Sequential:
    """Sparse and dense Jacobians, a diagonal, and a cut."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(),
        nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5),
    ).double()  # fmt: skip
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.l1_unstructured(model[9], "weight", 0.9)
    return model


def share(rank: int, training: bool, levels: int | None) -> dict[str, Any]:
    """On each rank: whatever is wrong with its gradients, nothing if all is well."""
    model = model_of().train(training)
    twin = model_of().train(training)
    x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    target = torch.tensor([0, 1, 2, 3])
    shared: list[backward.Shared] = []

    class Counted(backward.Shared):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            shared.append(self)

    backward.Shared = Counted  # type: ignore[misc]
    value = tl.chain_backward(model, x, lambda y: F.cross_entropy(y, target), levels, group=dist.group.WORLD)
    expected = F.cross_entropy(twin(x), target)
    expected.backward()
    wrong: dict[str, Any] = {}
    if float((value - expected).abs()) > 1e-12:
        wrong["loss"] = float(value - expected)
    for (name, mine), (_, true) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        if float((mine.grad - true.grad).abs().max()) > 1e-12:
            wrong[name] = float((mine.grad - true.grad).abs().max())
    counts = torch.zeros(dist.get_world_size())
    counts[rank] = shared[0].made
    dist.all_reduce(counts)
    if levels != 0 and not (counts > 0).all():
        wrong["made"] = counts.tolist()
    return wrong


def differ(rank: int) -> str:
    model = model_of().eval()
    try:
        tl.chain_backward(
            model, torch.full((1, 2, 8, 8), 1.0 + rank, dtype=torch.float64), torch.sum, group=dist.group.WORLD
        )
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("training", "levels", "ranks"), [(False, None, 3), (False, 1, 4), (True, None, 2), (False, None, 1)]
)
def test_processes_share_the_products(training: bool, levels: int | None, ranks: int) -> None:
    assert launch(share, ranks, training, levels) == [{}] * ranks


def test_processes_with_other_batches_are_told() -> None:
    assert all("the processes of the group have different losses" in told for told in launch(differ, 2))


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(TypeError, match=r"group must be a process group of torch\.distributed or None, got str"):
        tl.chain_backward(model_of(), torch.ones(2, 2, 8, 8, dtype=torch.float64), torch.sum, group="world")
