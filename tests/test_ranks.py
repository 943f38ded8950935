"""One sequence over many processes gives what one process gives."""

from __future__ import annotations

import gc

import pytest
import rank_cases
import torch.distributed as dist
from rank_processes import launch, mesh_of

from timeloom.distributed.mesh import group_of

Outcome = dict[tuple[str, tuple[int, int]], str]


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """What came of all cases on each of eight processes."""
    found = launch(rank_cases.run_all, 8, seconds=400)
    assert all(isinstance(outcome, dict) for outcome in found), found
    return found


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for shape, cases in rank_cases.MESHES.items() for name in cases]
)
def test_ranks_give_what_one_process_gives(outcomes: list[Outcome], name: str, shape: tuple[int, int]) -> None:
    for rank in range(shape[0] * shape[1]):
        assert outcomes[rank].get((name, shape), "not run: a rank failed before") == "", f"rank {rank}"


def test_what_a_group_knows_outlives_equal_meshes_from_before() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = mesh_of((1, 1))
        group_of(before)
        mesh = mesh_of((1, 1))
        group = group_of(mesh)
        del before
        gc.collect()
        assert group_of(mesh) is group
    finally:
        dist.destroy_process_group()
