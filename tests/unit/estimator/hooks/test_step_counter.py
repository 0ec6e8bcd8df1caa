"""StepCounterHook logs steps per second and writes summaries."""

from __future__ import annotations

import logging

import pytest

from stratagem.estimator.hooks.step_counter import StepCounterHook
from tests.unit.estimator.hooks.fake_loop import FakeClock, FakeSession
from tests.unit.estimator.hooks.read_scalars import read_scalars


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="stratagem.estimator")
    return lambda: [record.getMessage() for record in caplog.records]


def session_of(tmp_path, clock, seconds_per_step: float) -> FakeSession:
    def pass_time(step: int) -> None:
        clock.now_s += seconds_per_step

    return FakeSession(str(tmp_path / "model"), on_step=pass_time)


def test_counts_every_n_steps(tmp_path, lines) -> None:
    clock = FakeClock()
    session = session_of(tmp_path, clock, 0.25)
    session.loop([StepCounterHook(3, output_dir=tmp_path / "logs", clock=clock)], 8)
    assert lines() == ["global_step/sec: 4"] * 2
    assert read_scalars(tmp_path / "logs") == {"global_step/sec": [(4, 4.0), (7, 4.0)]}
    assert session.fetched == []


def test_counts_every_n_seconds(tmp_path, lines) -> None:
    clock = FakeClock()
    hook = StepCounterHook(None, 1.5, clock=clock)
    session_of(tmp_path, clock, 0.5).loop([hook], 7)
    assert lines() == ["global_step/sec: 2", "global_step/sec: 2"]


def test_time_that_stands_still_gives_no_number(tmp_path, lines) -> None:
    clock = FakeClock()
    session_of(tmp_path, clock, 0.0).loop([StepCounterHook(1, clock=clock)], 4)
    assert lines() == []


@pytest.mark.parametrize("given", [{"every_n_secs": 1}, {"every_n_steps": None}])
def test_interval_has_to_be_one_of_two(given) -> None:
    with pytest.raises(ValueError, match="StepCounterHook received every_n_steps="):
        StepCounterHook(**given)
