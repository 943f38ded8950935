"""Certificates of replays on their way to the host: when it looks at memory, and when it waits for the stream."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from timeloom.kernels import host_certificate
from timeloom.kernels.host_certificate import UNREAD, arrives, listening, read_in_place, tell
from timeloom.kernels.recording import Recording
from timeloom.torch_state import streams


class LateGPU:
    """A graph whose certificate comes with a look at memory, or with a wait for the stream alone."""

    def __init__(self, numbers: Tensor, at_once: bool) -> None:
        self._numbers, self._at_once, self._written = numbers, at_once, 0.0
        self.waits = 0

    def replay(self) -> None:
        self._written += 1.0
        if self._at_once:
            self._numbers.fill_(self._written)

    def synchronize(self) -> None:
        self.waits += 1
        self._numbers.fill_(self._written)


def recording(at_once: bool, monkeypatch: pytest.MonkeyPatch, count: int = 3) -> tuple[Recording, LateGPU]:
    monkeypatch.setattr(streams, "may_replay", lambda _: True)
    numbers = torch.full((count,), UNREAD)
    gpu: Any = LateGPU(numbers, at_once)
    stream: Any = SimpleNamespace(cuda_stream=0, synchronize=gpu.synchronize)
    return Recording(gpu, [torch.zeros(2)], [torch.zeros(2)], 8, stream, numbers), gpu


def run(one: Recording) -> int:
    found = one.replay_some([torch.zeros(2)], [torch.ones(2)], [])
    assert found is not None
    return found[1]


def test_what_has_arrived_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one, gpu = recording(True, monkeypatch)
    for call in range(3):
        assert one.read_all(run(one)) == [call + 1.0] * 3
    assert gpu.waits == 0


def test_what_has_not_arrived_is(monkeypatch: pytest.MonkeyPatch) -> None:
    one, gpu = recording(False, monkeypatch)
    for call in range(3):
        assert one.read(run(one)) == call + 1.0
    assert gpu.waits == 3


def test_a_replay_that_nobody_read_may_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    one, gpu = recording(True, monkeypatch)
    run(one)
    turn = run(one)
    assert one.read(turn) == 2.0
    assert gpu.waits == 1, "the mark could have been overwritten by the first replay"
    assert one.read(run(one)) == 3.0
    assert gpu.waits == 1


def test_another_replay_hides_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = recording(True, monkeypatch)
    turn = run(one)
    run(one)
    assert one.read(turn) is None


@pytest.mark.parametrize("place", range(3))
def test_all_numbers_are_waited_for(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = read_in_place(torch.ones(3))
    assert arrives(numbers)
    numbers[place] = UNREAD
    monkeypatch.setattr(host_certificate, "LOOKS", 5)
    assert not arrives(numbers)


def test_the_first_certificate_that_is_told_counts_in_its_thread_alone() -> None:
    room = torch.zeros(4)
    with listening(room) as listener:
        other = threading.Thread(target=tell, args=(torch.tensor(9.0),))
        other.start()
        other.join()
        assert not listener.heard
        tell(torch.tensor(2.0))
        tell(torch.tensor(3.0))
    tell(torch.tensor(4.0))
    assert isinstance(listener.numbers, Tensor)
    assert listener.numbers.tolist() == [2.0]
    assert room.tolist() == [2.0, 0.0, 0.0, 0.0]


def test_more_numbers_than_there_is_room_for_are_not_read() -> None:
    with listening(torch.zeros(4)) as listener:
        tell(torch.ones(5))
    assert listener.heard
    assert listener.numbers is None
