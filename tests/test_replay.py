"""When calls are recorded, without a GPU: the counts of calls of a kind, and of a family of kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from timeloom.kernels import replay
from timeloom.kernels.recording import Recording
from timeloom.kernels.replay import CALLS_BEFORE, MOST_KEYS, Recordings
from timeloom.torch_state import streams


class Kept(Recording):
    """A recording of nothing, which says that it was replayed."""

    def __init__(self) -> None:
        self.size, self.used, self.ground = 1, 0, None

    def replay(self, given: Any) -> list[Any]:
        return ["replayed"]

    def drop(self) -> None:
        pass


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    monkeypatch.setattr(replay, "_here", lambda key, device: key)
    monkeypatch.setattr(replay, "_memory", lambda device: 2**40)
    monkeypatch.setattr(replay, "_recorded", lambda *given: Kept())
    monkeypatch.setattr(streams, "capturing", lambda device: False)
    return Recordings()


def run(recordings: Recordings, key: str, calls: int, family: Any = None) -> list[Any]:
    given = [torch.zeros(1)]
    return [recordings.run(key, given, 1, lambda given: ["launched"], family=family)[0] for _ in range(calls)]


def test_every_kind_is_launched_before_it_is_recorded(recordings: Recordings) -> None:
    for key in ("four sweeps", "five sweeps"):
        assert run(recordings, key, CALLS_BEFORE + 2) == CALLS_BEFORE * ["launched"] + 2 * ["replayed"]


def test_another_kind_of_a_family_is_recorded_at_once(recordings: Recordings) -> None:
    assert run(recordings, "four sweeps", CALLS_BEFORE, "layer") == CALLS_BEFORE * ["launched"]
    assert run(recordings, "five sweeps", 2, "layer") == 2 * ["replayed"]
    assert run(recordings, "five sweeps of another", 1, "other") == ["launched"]
    recordings.clear()
    assert run(recordings, "five sweeps", 1, "layer") == ["launched"]


def test_few_families_are_counted_those_called_last(recordings: Recordings) -> None:
    for number in range(2 * MOST_KEYS):
        run(recordings, f"{number}", 1, number)
        run(recordings, f"{number} often", 1, "often")
    assert len(recordings._families) <= MOST_KEYS
    assert 0 not in recordings._families
    assert recordings._families["often"] > CALLS_BEFORE
