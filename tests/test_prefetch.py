"""Batches that are made ready in a second thread are those that would have been made in the first."""

from __future__ import annotations

import threading

import pytest

from timeloom.app.data.prefetch import Prefetch


def test_what_was_begun_is_taken_and_what_was_not_is_made() -> None:
    made = []

    def make(step: int) -> int:
        made.append((step, threading.current_thread() is threading.main_thread()))
        return 10 * step

    batches = Prefetch(make)
    assert batches.take(3) == 30
    batches.begin(4)
    assert batches.take(4) == 40
    batches.begin(5)
    assert batches.take(7) == 70
    assert batches.take(5) == 50
    batches.close()
    assert [step for step, in_main in made if in_main] == [3, 7, 5]
    assert (4, False) in made


def test_it_does_not_wait_for_what_it_begins() -> None:
    go = threading.Event()

    def make(step: int) -> int:
        assert go.wait(60)
        return step

    batches = Prefetch(make)
    batches.begin(1)
    go.set()
    assert batches.take(1) == 1
    batches.close()


def test_errors_come_out_where_the_batch_is_taken() -> None:
    batches = Prefetch(lambda step: 1 // step)
    batches.begin(0)
    with pytest.raises(ZeroDivisionError):
        batches.take(0)
    assert batches.take(1) == 1
    batches.close()
