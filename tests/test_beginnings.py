"""Whether calls begin at known states: where that may save enough, is tried, and turns out to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import replayed_on_cpu as emulated
import torch
from replayed_on_cpu import Chunks
from test_warm_layers import PlainLayer
from torch import Tensor, nn

import timeloom as tl
from timeloom.auto import beginnings
from timeloom.auto.beginnings import (
    AMORTISED,
    FIRST_WAIT,
    LEARNING,
    LEFT,
    LOOK,
    TRIED,
    Beginning,
    savable,
)
from timeloom.auto.experience import Experience
from timeloom.auto.layer_experience import LayerExperience
from timeloom.auto.sweep_counts import SweepCounts
from timeloom.auto.warmups import WarmupSearch
from timeloom.kernels import replay
from timeloom.report import SolveReport
from timeloom.solve import trunk
from timeloom.solve.recurrence import BEGUN

USUAL, FASTER, SLOWER = 0.02, 0.01, 0.03
STEPS = 100


def call(beginning: Beginning, with_known: float, known: bool = True, saves: float = 0.01, **store: bool) -> str:
    """One call that takes this long at known states."""
    turn = beginning.turn(store.get("repeats", True), store.get("full", False))
    begins = turn == "begin" and known
    beginning.note(turn, begins, with_known if begins else USUAL, STEPS, saves)
    return "begun" if begins else "kept" if turn == "begin" else turn


def calls(beginning: Beginning, count: int, *given: Any, **more: Any) -> list[str]:
    return [call(beginning, *given, **more) for _ in range(count)]


def test_known_states_that_save_little_are_left_alone() -> None:
    beginning = Beginning(cost=2e-3)
    assert calls(beginning, 200, FASTER, saves=1e-3) == ["as usual"] * 200
    assert beginning.why == f"{LEFT}: they would save 1 ms at most"
    calls(beginning, 20, FASTER, saves=1.4e-3)
    assert beginning.why == f"{LEFT}: they would save 1 ms at most", "words that do not change at every call"
    assert "begun" in calls(beginning, 20, FASTER, saves=5e-3)


def test_a_small_share_of_a_long_call_is_not_worth_a_try() -> None:
    beginning = Beginning(cost=1e-6)
    assert calls(beginning, 50, FASTER, saves=0.19 * USUAL) == ["as usual"] * 50
    assert "begun" in calls(beginning, 20, FASTER, saves=0.3 * USUAL)


def test_nothing_is_kept_where_samples_do_not_come_back() -> None:
    beginning = Beginning()
    assert calls(beginning, 200, FASTER, repeats=False) == ["as usual"] * 200
    assert beginning.why == ""


def test_a_gain_is_found_and_watched() -> None:
    beginning = Beginning()
    assert calls(beginning, FIRST_WAIT, FASTER) == ["as usual"] * FIRST_WAIT
    assert calls(beginning, 5, FASTER, known=False) == ["kept"] * 5
    tried = calls(beginning, 2 * TRIED + LEARNING + 2, FASTER)
    assert tried[:LEARNING] == ["begun"] * LEARNING
    assert beginning.phase == "begun"
    later = calls(beginning, 4 * LOOK, FASTER)
    assert later.count("as usual") == 4
    assert later.count("begun") == 4 * LOOK - 4
    gone = calls(beginning, 2 * TRIED, SLOWER)
    assert gone[-1] == "as usual"
    assert not beginning.keeps
    assert beginning.why == f"{LEFT}: a call took 20 ms with them, 20 ms without", "as soon as the median says so"


def test_a_try_without_gain_is_not_soon_made_again() -> None:
    beginning = Beginning()
    calls(beginning, FIRST_WAIT, SLOWER)
    tried = 0
    while call(beginning, SLOWER) and beginning.keeps:
        tried += 1
    assert tried < 3 * TRIED + LEARNING
    waited = calls(beginning, 100 * tried, SLOWER).index("begun")
    assert AMORTISED * tried <= waited <= AMORTISED * (tried + 1)


def test_batches_that_stay_unknown_count_as_what_they_take() -> None:
    """Of samples that there is no room for, most batches hold one: those calls keep states and gain nothing."""
    beginning = Beginning()
    calls(beginning, FIRST_WAIT, FASTER)
    for index in range(6 * TRIED):
        call(beginning, FASTER, known=index % 8 == 0, full=True)
    assert not beginning.keeps


def test_a_store_without_room_is_given_up() -> None:
    beginning = Beginning()
    calls(beginning, FIRST_WAIT, FASTER)
    calls(beginning, 20, FASTER, known=False)
    seen = calls(beginning, 60, FASTER, known=False, full=True)
    assert seen.index("as usual") == 22 + FIRST_WAIT
    assert beginning.why == f"{LEFT}: there was no room for those of all samples"


def test_a_barred_kind_of_call_is_as_usual() -> None:
    beginning = Beginning()
    calls(beginning, FIRST_WAIT, FASTER)
    assert call(beginning, FASTER) == "begun"
    beginning.bar()
    assert calls(beginning, 50, FASTER) == ["as usual"] * 50
    assert beginning.why == ""


def test_what_known_states_may_save() -> None:
    swept = SolveReport("shooting[none]", 64, 1, (1e-7,), 1e-6, True, False, None, 0.1, warmup=192)
    assert savable(swept, 1000, False, 2) == pytest.approx(0.075)
    corrected = replace(swept, warmup=0, iterations=5)
    assert savable(corrected, 1000, False, 2) == pytest.approx(0.08)
    whole = SolveReport.sequential(1000, "auto", seconds=0.1)
    assert savable(whole, 1000, False, 16) == 0
    assert savable(whole, 1000, True, 16) == pytest.approx(0.0875)
    assert savable(whole, 1000, True, 1) == savable(whole, 1000, True, 2) == 0


def test_less_is_looked_for_from_known_states() -> None:
    learned = LayerExperience(
        Experience(0.99, search=WarmupSearch(640, 600, wait=50), counts=SweepCounts(too_few=7), pause=3)
    )
    warm = learned.beginning(True)
    assert (warm.search.enough, warm.counts.too_few, warm.pause) == (640, 0, 0)
    assert 40 < warm.warmup(1e-6) < 320
    assert learned.forward.warmup(1e-6) == 640


# ---- modules ---------------------------------------------------------------------------------------------------------


def timed(monkeypatch: pytest.MonkeyPatch, with_known: float) -> None:
    """Let calls take this long at known states, and much to be saved."""
    honest = Beginning.note

    def note(self: Beginning, turn: Any, began: bool, seconds: float, steps: int, saves: float) -> None:
        honest(self, turn, began, with_known if began else USUAL, steps, 1.0)

    monkeypatch.setattr(Beginning, "note", note)


def trained(layer: Any, x: Tensor, count: int, warm: tl.WarmStarts) -> list[str]:
    """Calls on the same samples, weights moving a little; what each report said."""
    reasons = []
    for _ in range(count):
        with warm.batch(range(x.shape[1])):
            y, _ = layer(x)
        exact = nn.GRU(2, 5).double()
        exact.load_state_dict(layer.state_dict())
        torch.testing.assert_close(y, exact(x.double())[0].float(), rtol=1e-4, atol=1e-5)
        reasons.append(layer.reports[0].reason)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter += 1e-5 * torch.randn_like(parameter)
    return reasons


@pytest.mark.parametrize(("with_known", "pays"), [(FASTER, True), (SLOWER, False)])
def test_auto_begins_there_where_it_pays(with_known: float, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(trunk, "layer_kind", lambda cell, x: PlainLayer)
    timed(monkeypatch, with_known)
    layer, x, warm = tl.GRU(2, 5), torch.randn(3001, 1, 2), tl.WarmStarts()
    with torch.no_grad():
        reasons = trained(layer, x, FIRST_WAIT + 2 * (TRIED + LEARNING) + 4, warm)
    assert not any(BEGUN in reason for reason in reasons[:FIRST_WAIT])
    assert any(BEGUN in reason for reason in reasons[FIRST_WAIT:])
    assert (BEGUN in reasons[-1]) == pays
    assert (LEFT in reasons[-1]) != pays
    assert (len(warm) == 1) == pays, "states that are not begun at are not kept"
    assert (layer._experiences[0].warm is not None) == pays


def test_a_chosen_solver_begins_at_once_and_stops_where_that_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    timed(monkeypatch, SLOWER)
    layer, x, warm = tl.GRU(2, 5, solver="deer"), torch.randn(40, 1, 2), tl.WarmStarts()
    with torch.no_grad():
        reasons = trained(layer, x, 80, warm)
    assert [BEGUN in reason for reason in reasons[:5]] == [False] + [True] * 4
    assert BEGUN not in reasons[-1]
    assert len(warm) == 0


def test_a_store_that_is_told_so_always_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(trunk, "layer_kind", lambda cell, x: PlainLayer)
    timed(monkeypatch, SLOWER)
    with torch.no_grad():
        reasons = trained(tl.GRU(2, 5), torch.randn(3001, 1, 2), 60, tl.WarmStarts(always=True))
    assert [BEGUN in reason for reason in reasons] == [False] + [True] * 59


def test_kernels_that_enter_chunks_by_themselves_are_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, FASTER)
    asked: list[bool] = []
    honest = trunk.LayerSolve.run

    def run(self: Any, inputs: Any, record: Any, guess: Any = None) -> Any:
        asked.append(guess is not None)
        return honest(self, inputs, record, guess)

    monkeypatch.setattr(trunk.LayerSolve, "run", run)
    layer, x, warm = tl.GRU(2, 5), torch.randn(600, 1, 2), tl.WarmStarts()
    with torch.no_grad():
        trained(layer, x, 30, warm)
    assert sum(asked) == 1
    assert len(warm) == 0


def test_samples_that_come_back_are_seen() -> None:
    store = tl.WarmStarts()
    for keys in ([0, 1], [2, 3], [4, 5]):
        store.of(keys)
    assert not store.repeats
    store.of([9, 3])
    assert store.repeats


# ---- replays ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    emulated.install(monkeypatch)
    torch.manual_seed(0)
    yield
    replay.RECORDINGS.clear()


def test_calls_as_usual_are_replays_alone(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    through: list[str] = []
    honest = trunk.LayerSolve.forward

    def forward(self: Any, *given: Any, **more: Any) -> Any:
        through.append("trunk")
        return honest(self, *given, **more)

    monkeypatch.setattr(trunk.LayerSolve, "forward", forward)
    monkeypatch.setattr(beginnings, "REACH", 0.0)  # never enough to save
    layer, x, warm = tl.GRU(3, 4, solver=Chunks(tol=2e-5)), torch.randn(47, 2, 3), tl.WarmStarts()
    exact = nn.GRU(3, 4).double()
    exact.load_state_dict(layer.state_dict())
    right = exact(x.double())[0]
    right.square().sum().backward()
    for _ in range(12):
        through.clear()
        layer.zero_grad()
        with warm.batch([0, 1]):
            y = layer(x)[0]
        y.square().sum().backward()
        torch.testing.assert_close(y.double(), right, rtol=1e-3, atol=1e-4)
    assert through == []
    assert LEFT in layer.reports[0].reason
    torch.testing.assert_close(layer.weight_hh_l0.grad.double(), exact.weight_hh_l0.grad, rtol=1e-3, atol=1e-3)
    assert layer.reports[0].backward is not None
