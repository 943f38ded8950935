"""The checks of `python -m tests.gpu`, one test for each piece and check."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.__main__ import PIECES
from tests.gpu.checks import Check, Unfit

CHECKS = [pytest.param(check, id=f"{piece}-{check.name}") for piece, make in PIECES.items() for check in make()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", CHECKS if torch.cuda.is_available() else CHECKS[:1])
def test_on_device(check: Check, device: str) -> None:
    try:
        check.run(device)
    except Unfit as reason:
        pytest.skip(str(reason))
