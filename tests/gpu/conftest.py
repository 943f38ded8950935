"""`pytest tests/gpu --device cpu` runs the checks on a CPU; by default they are for a GPU, and skipped without one."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", choices=("cpu", "cuda"), help="where tests/gpu run")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where to run."""
    name: str = request.config.getoption("--device", default="cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU (or --device cpu)")
    return name
