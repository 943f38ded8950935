"""`inspect`: every solver on the same problem, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import timeloom as tl
import timeloom.inspection.trials
from timeloom.solvers import MGRIT, Shooting

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a pass takes does not matter here."""
    monkeypatch.setattr(timeloom.inspection.trials, "REPEATS", 0)


@pytest.mark.parametrize("kind", [tl.GRU, tl.ImplicitGRU, tl.LSTM])
def test_solvers_side_by_side(kind: type[tl.GRU], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = kind(3, 8)
    inspection = tl.inspect(module, torch.randn(300, 2, 3), every=True)
    assert (inspection.steps, inspection.batch) == (300, 2)
    assert {"auto", "shooting newton", "mgrit", "mgrit, 4 a level", "deer", "elk"} <= set(inspection.reports)
    for name, reports in inspection.reports.items():
        assert len(reports) == 1
        assert name == "auto" or reports[0].backward is not None
    outcomes = {trial.name: trial for trial in inspection.trials}
    assert outcomes.pop("mgrit as published").outcome == "inexact"
    assert max(trial.difference for trial in outcomes.values()) < 1e-4
    text = str(inspection)
    assert text.splitlines()[0].split() == ["solver", "sweeps", "backward", "outcome", "ms", "difference"]
    assert all(f"\n{name} " in text for name in inspection.reports)
    assert "Fastest on this batch" in text
    if kind is tl.GRU:  # drawing is slow, and the same for all
        inspection.plot(tmp_path / "residuals.svg")
        drawn = (tmp_path / "residuals.svg").read_text()
        assert drawn.count("mgrit, 4 a level") >= 2
        assert "level 1" in drawn


def test_solvers_of_ones_own_and_several_layers() -> None:
    module = tl.GRU(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64)
    solvers = {"ours": MGRIT(coarsening=4), "chunks": Shooting(chunk=5)}
    inspection = tl.inspect(module, torch.randn(60, 2, 3, dtype=torch.float64), solvers=solvers)
    assert list(inspection.reports) == ["auto", "ours", "chunks"]
    assert all(len(reports) == 4 for reports in inspection.reports.values())
    assert [where for where, _ in inspection.trials[2].reports] == [
        "layer 1", "layer 1 reversed", "layer 2", "layer 2 reversed",
    ]  # fmt: skip
    assert max(trial.difference for trial in inspection.trials) < 1e-10


class Tagger(nn.Module):
    """Somebody's model on torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.LSTM(3, 8, num_layers=2, batch_first=True, dropout=0.5)
        self.decode = nn.GRU(8, 4, batch_first=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.drop(self.decode(input=self.encode(x)[0])[0]) * scale


def test_any_model_that_holds_recurrent_layers() -> None:
    torch.manual_seed(0)
    model = Tagger()
    inspection = tl.inspect(model, torch.randn(2, 90, 3), scale=2.0, solvers={"chunks": Shooting(chunk=10)})
    assert (inspection.steps, inspection.batch) == (90, 2)
    assert [where for where, _ in inspection.trials[2].reports] == ["layer 1", "layer 2", "layer 3"]
    assert inspection.trials[2].difference < 1e-5  # the same dropout in all: none
    assert model.training
    assert type(model.decode) is nn.GRU
    assert model.encode.dropout == 0.5


def test_packed_and_unbatched_inputs() -> None:
    packed = pack_sequence([torch.randn(20, 3), torch.randn(7, 3)])
    found = tl.inspect(tl.GRU(3, 4), packed, solvers={"chunks": Shooting(chunk=5)})
    assert (found.steps, found.batch) == (20, 2)
    assert found.trials[2].difference < 1e-5
    assert tl.inspect(tl.GRU(3, 4), torch.randn(20, 3), solvers={}).batch == 1


def test_the_module_is_left_as_it_is() -> None:
    module = tl.GRU(3, 4)
    tl.inspect(module, torch.randn(40, 2, 3))
    assert module.solver == "auto"
    assert module.reports == []
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_model_without_recurrent_layers_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear holds no GRU, LSTM or RNN layer to inspect"):
        tl.inspect(nn.Linear(3, 4), torch.randn(40, 2, 3))
