"""Waits of a process, by what it waited for."""

from __future__ import annotations

import itertools
import time
import types

import pytest

from stratagem.observe import wait_clock as module
from stratagem.observe.wait_clock import DataWait, PeerSizesWait, StepWaits, WaitClock


class FakeTime:
    """A clock that moves only when a test moves it."""

    def __init__(self, monkeypatch, owner=module) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(owner, "time", types.SimpleNamespace(monotonic=lambda: self.now_s))


def ticking() -> types.SimpleNamespace:
    """In place of the module `time`: each look at the clock is a millisecond after the last."""
    looks = itertools.count(1)
    look = lambda: next(looks) / 1000  # noqa: E731
    look_ns = lambda: next(looks) * 1_000_000  # noqa: E731
    return types.SimpleNamespace(
        monotonic=look, monotonic_ns=look_ns, perf_counter=look, time=look, sleep=time.sleep
    )


@pytest.fixture
def clock(monkeypatch) -> FakeTime:
    return FakeTime(monkeypatch)


def test_wait_for_data_is_input_once_and_also_where_the_data_ends(clock) -> None:
    waits = WaitClock()
    with DataWait(waits):
        with DataWait(waits):
            clock.now_s += 0.5
        clock.now_s += 0.25
    assert (waits.input_s, waits.peers_s, waits.waits_for_data) == (0.75, 0, False)

    def end() -> None:
        with DataWait(waits):
            clock.now_s += 0.25
            raise StopIteration

    with pytest.raises(StopIteration):
        end()
    assert waits.input_s == 1.0


@pytest.mark.parametrize(("sizes_s", "expected"), [(0.3, (0.2, 0.3)), (9.0, (0.0, 0.5))])
def test_wait_for_the_sizes_of_others_is_none_for_own_data(clock, sizes_s, expected) -> None:
    """A thread that reads ahead may have waited for longer than the program."""
    waits = WaitClock()
    with DataWait(waits):
        waits.sizes_s += sizes_s
        clock.now_s += 0.5
    assert (waits.input_s, waits.peers_s) == pytest.approx(expected)


def test_sizes_are_counted_by_themselves(clock) -> None:
    waits = WaitClock()
    with PeerSizesWait(waits):
        clock.now_s += 0.75
    assert waits.sizes_s == 0.75
    assert waits.read().waited_s == 0


def test_waits_and_transfers_since_a_reading() -> None:
    waits = WaitClock()
    waits.programs_s = waits.idle_s = waits.input_s = waits.peers_s = 1.0
    before = waits.read()
    waits.programs_s, waits.idle_s, waits.input_s, waits.peers_s = 1.5, 1.25, 1.25, 1.125
    assert waits.since(before) == StepWaits(
        waited_s=0.625, idle_s=0.25, input_s=0.25, peers_s=0.125
    )
    assert waits.read().waited_s == pytest.approx(2.625)
    waits.measures_transfers, waits.transfer_s = True, 1.0
    before = waits.read()
    waits.peers_s, waits.transfer_s = 1.625, 3.0
    found = waits.since(before)
    assert (found.waited_s, found.peers_s, found.transfer_s) == (2.5, 0.5, 2.0)
