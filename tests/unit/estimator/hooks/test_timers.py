"""Timers follow TensorFlow's SecondOrStepTimer, and one clock across processes."""

from __future__ import annotations

import itertools

import pytest

from stratagem.devices.collectives import host
from stratagem.estimator.hooks import timers
from stratagem.estimator.hooks.timers import NeverTriggerTimer, SecondOrStepTimer, SynchronizedTimer
from tests.unit.estimator.hooks.fake_loop import FakeClock


def triggered(timer, steps, *, before_each=lambda: None) -> list[int]:
    found = []
    for step in steps:
        before_each()
        if timer.should_trigger_for_step(step):
            timer.update_last_triggered_step(step)
            found.append(step)
    return found


@pytest.mark.parametrize("kind", [SecondOrStepTimer, SynchronizedTimer])
def test_steps_trigger_at_the_first_and_then_after_each_interval(kind) -> None:
    timer = kind(every_steps=3)
    assert triggered(timer, [1, 2, 3, 4, 5, 6, 7, 20, 21, 23]) == [1, 4, 7, 20, 23]
    timer.reset()
    assert triggered(timer, [5, 6]) == [5]


@pytest.mark.parametrize("kind", [SecondOrStepTimer, SynchronizedTimer])
def test_seconds_trigger_when_they_are_over(kind) -> None:
    clock = FakeClock()
    timer = kind(every_secs=10, clock=clock)

    def pass_4_seconds() -> None:
        clock.now_s += 4

    assert triggered(timer, range(8), before_each=pass_4_seconds) == [0, 3, 6]


def test_same_step_does_not_trigger_twice() -> None:
    clock = FakeClock()
    timer = SecondOrStepTimer(every_secs=1, clock=clock)
    timer.update_last_triggered_step(7)
    clock.now_s += 100
    assert not timer.should_trigger_for_step(7)
    assert timer.should_trigger_for_step(8)


def test_tells_what_passed_since_it_was_triggered() -> None:
    clock = FakeClock()
    timer = SecondOrStepTimer(every_secs=1, clock=clock)
    assert timer.last_triggered_step() is None
    assert timer.update_last_triggered_step(5) == (None, None)
    clock.now_s += 2.5
    assert timer.update_last_triggered_step(15) == (2.5, 10)
    assert timer.last_triggered_step() == 15


@pytest.mark.parametrize("interval", [{}, {"every_secs": 1, "every_steps": 1}])
def test_interval_has_to_be_one_of_two(interval) -> None:
    with pytest.raises(ValueError, match="A timer received every_secs="):
        SecondOrStepTimer(**interval)


def test_negative_interval_is_an_error() -> None:
    with pytest.raises(ValueError, match="A timer received a negative interval"):
        SecondOrStepTimer(every_steps=-1)


def test_never_is_never() -> None:
    timer = NeverTriggerTimer()
    timer.reset()
    assert triggered(timer, range(3)) == []
    assert timer.update_last_triggered_step(1) == (None, None)
    assert timer.last_triggered_step() is None


class Processes:
    """Several timers in lockstep that count their broadcasts."""

    def __init__(self, monkeypatch, clocks) -> None:
        self.timers = [SynchronizedTimer(every_secs=10, clock=clock) for clock in clocks]
        self.num_told = 0
        self._asking, self._told = 0, {}
        monkeypatch.setattr(timers, "current_group", lambda: "a group")
        monkeypatch.setattr(host, "broadcast_object", self._broadcast)

    def _broadcast(self, value, *, name):
        assert name == "whether a hook is due"
        if self._asking == 0:
            self.num_told += 1
            self._told = value
        return self._told

    def triggered_at(self, step) -> list[bool]:
        found = []
        for index, timer in enumerate(self.timers):
            self._asking = index
            found.append(timer.should_trigger_for_step(step))
            if found[-1]:
                timer.update_last_triggered_step(step)
        return found


def test_processes_trigger_at_the_same_steps_whatever_their_clocks_say(monkeypatch) -> None:
    clocks = [FakeClock(), FakeClock()]
    processes, steps = Processes(monkeypatch, clocks), []
    for step in range(1000):
        clocks[0].now_s += 0.1
        clocks[1].now_s += 0.9
        found = processes.triggered_at(step)
        assert found[0] == found[1]
        steps += [step] if found[0] else []
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    # 10 s are 100 steps; it is looked once in 10 steps, so it can be late by so many.
    assert steps[0] == 0
    assert gaps <= set(range(100, 111))
    assert processes.num_told <= 1000 / 10 + 10
