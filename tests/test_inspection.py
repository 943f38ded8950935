"""`inspect`: every solver on the same problem, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import timeloom as tl
from timeloom.solvers import MGRIT, Shooting

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", [tl.GRU, tl.ImplicitGRU, tl.LSTM])
def test_solvers_side_by_side(kind: type[tl.GRU], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = kind(3, 8)
    inspection = tl.inspect(module, torch.randn(300, 2, 3))
    assert {"shooting", "mgrit", "mgrit, 4 a level", "mgrit as published"} <= set(inspection.reports)
    for reports in inspection.reports.values():
        assert len(reports) == 1
        assert reports[0].backward is not None
    text = str(inspection)
    assert text.count("forward") == text.count("backward") == len(inspection.reports)
    assert "(inexact)" in text
    if kind is tl.GRU:  # drawing is slow, and the same for all
        inspection.plot(tmp_path / "residuals.svg")
        drawn = (tmp_path / "residuals.svg").read_text()
        assert drawn.count("mgrit, 4 a level") >= 2
        assert "level 1" in drawn


def test_solvers_of_ones_own_and_several_layers() -> None:
    module = tl.GRU(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64)
    solvers = {"ours": MGRIT(coarsening=4), "chunks": Shooting(chunk=5)}
    inspection = tl.inspect(module, torch.randn(60, 2, 3, dtype=torch.float64), solvers=solvers)
    assert list(inspection.reports) == ["ours", "chunks"]
    assert all(len(reports) == 4 for reports in inspection.reports.values())
    assert "ours [3]" in str(inspection)


def test_the_module_is_left_as_it_is() -> None:
    module = tl.GRU(3, 4)
    tl.inspect(module, torch.randn(40, 2, 3))
    assert module.solver == "auto"
    assert module.reports == []
    assert all(parameter.grad is None for parameter in module.parameters())


def test_it_takes_timelooms_modules_alone() -> None:
    with pytest.raises(TypeError, match="must be one of timeloom's recurrent modules, got GRU"):
        tl.inspect(nn.GRU(3, 4), torch.randn(40, 2, 3))
