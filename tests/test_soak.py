"""What a long training is judged by: growth counts when all kinds of calls have come, and short runs do not pass."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, product
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.soak_rule import BATCHES, MOST_GROWTH, SOLVERS, all_drawn, calls, judged, settled

READINGS = 31


def readings(last: int, grows: dict[int, float] | None = None, leak: float = 0.0) -> list[dict[str, float]]:
    """Readings of a run of so many steps: memory that steps up at some steps, and by a leak with every step."""
    seen = []
    for index in range(READINGS):
        steps = round(last * index / (READINGS - 1))
        device = 166 + leak * steps + sum(more for step, more in (grows or {}).items() if step <= steps)
        still = dict.fromkeys(("host", "libraries", "reserved", "kernels", "objects"), 100.0)
        seen.append({"minutes": index / 3, "steps": steps, "device": device, "drift": 0.0, "echo": 0.0, **still})
    return seen


def test_growth_counts_after_all_kinds_of_calls_have_come() -> None:
    late = {2_100: 33.0, 2_300: 40.0}
    assert judged(readings(8_000, late), drawn=100) == {}  # a third of the time is past both
    assert set(judged(readings(4_000, late), drawn=100)) == {"device"}  # a third is not
    assert judged(readings(4_000, late), drawn=2_398) == {}


def test_a_leak_is_found_wherever_a_run_has_settled() -> None:
    for drawn in (10, 2_400, 3_900):
        assert set(judged(readings(6_000, leak=0.1), drawn)) == {"device"}
        assert judged(readings(6_000, leak=0.001), drawn) == {}


@pytest.mark.parametrize("name", MOST_GROWTH)
def test_everything_that_is_read_can_fail(name: str) -> None:
    seen = readings(6_000)
    seen[-1][name] += MOST_GROWTH[name] + 1
    assert set(judged(seen, drawn=2_400)) == {name}


def test_a_run_in_which_too_few_steps_follow_does_not_pass() -> None:
    assert set(judged(readings(1_731), drawn=2_398)) == {"steps"}
    assert set(judged(readings(3_000), drawn=2_398)) == {"steps"}
    assert set(judged(readings(1_731, leak=1.0), drawn=2_398)) == {"steps", "device"}
    assert set(judged(readings(100)[:1], drawn=0)) == {"steps"}


def test_losses_that_part_are_told_and_the_echo_excuses_as_much() -> None:
    apart = [one | {"drift": 0.1} for one in readings(6_000)]
    assert set(judged(apart, drawn=2_400)) == {"drift"}
    assert judged([one | {"echo": 0.05} for one in apart], drawn=2_400) == {}


def test_the_kinds_of_calls_come_with_the_seed() -> None:
    for seed in (0, 96):
        drawn = all_drawn("cuda", seed, soak.PAIRS)
        some = list(islice(calls("cuda", seed, soak.PAIRS), drawn))
        kinds = Counter((call.length, call.batch, call.solver) for call in some)
        lengths = {call.length for call in some}
        assert set(kinds) == set(product(lengths, BATCHES, SOLVERS))
        last = some[-1]
        assert kinds[last.length, last.batch, last.solver] == 1  # not a step earlier
    assert set(soak.SOLVERS) == set(SOLVERS)


def test_a_log_is_judged_as_the_run_was(tmp_path: Path) -> None:
    log = tmp_path / "log"
    seen = readings(10_000)
    log.write_text("a warning\n" + "".join(json.dumps(one) + "\n" for one in seen))
    assert soak.read(log, "cpu", 9.0, 27)["failed"] == []
    assert settled(seen, all_drawn("cpu", 27, soak.PAIRS)) == 12


def test_a_short_run_says_that_it_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "see_everything", lambda *given: None)
    monkeypatch.setattr(soak, "BESIDE", ())
    found = soak.run("cpu", 0.02, 0)
    assert found["steps"] >= 1
    assert any("too short" in line for line in found["failed"])
    assert "| minutes | steps |" in soak.page(
        found, {"processor": "a", "date": "b", "torch": "c", "timeloom": "d", "code": "e"}
    )
