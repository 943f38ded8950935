"""One sequence over many processes gives what one process gives."""

from __future__ import annotations

import pytest
import rank_cases
from rank_processes import launch

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
