"""LoggingTensorHook logs at the same steps as TensorFlow's."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from stratagem.estimator.hooks.timers import LoggingTensorHook
from tests.unit.estimator.hooks.fake_loop import FakeClock, FakeSession


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="stratagem.estimator")
    return lambda: [record.getMessage() for record in caplog.records]


def fetched_steps(session) -> list[int]:
    return [step for step, _ in session.fetched]


def test_every_n_iterations_begin_with_the_first(lines) -> None:
    clock = FakeClock()

    def pass_half_a_second(step: int) -> None:
        clock.now_s += 0.5

    session = FakeSession(global_step=50, on_step=pass_half_a_second)
    hook = LoggingTensorHook({"b": "loss", "a": "global_step"}, every_n_iter=3, clock=clock)
    session.loop([hook], 8)
    assert fetched_steps(session) == [51, 54, 57]
    assert lines() == ["a = 51, b = 51", "a = 54, b = 54 (1.500 sec)", "a = 57, b = 57 (1.500 sec)"]


def test_every_n_seconds(lines) -> None:
    clock = FakeClock()

    def pass_a_second(step: int) -> None:
        clock.now_s += 1

    session = FakeSession(on_step=pass_a_second)
    session.loop([LoggingTensorHook(["loss"], every_n_secs=2.5, clock=clock)], 9)
    # The clock is asked before a step, and started anew after it.
    assert lines() == ["loss = 1", "loss = 5 (4.000 sec)", "loss = 9 (4.000 sec)"]


def test_at_end_alone_fetches_in_no_step(lines) -> None:
    session = FakeSession()
    session.loop([LoggingTensorHook(["loss"], at_end=True)], 5)
    assert fetched_steps(session) == [5]
    assert lines() == ["loss = 5"]


def test_at_end_and_every_n_iterations(lines) -> None:
    session = FakeSession()
    session.loop([LoggingTensorHook(["loss"], every_n_iter=4, at_end=True)], 6)
    assert fetched_steps(session) == [1, 5, 6]


def test_second_run_begins_anew(lines) -> None:
    hook, session = LoggingTensorHook(["loss"], every_n_iter=10), FakeSession()
    session.loop([hook], 3)
    session.loop([hook], 3)
    assert fetched_steps(session) == [1, 4]


def test_formatter_makes_the_line(lines) -> None:
    hook = LoggingTensorHook(["x"], 1, formatter=lambda values: f"<{values['x']}> 100%")
    FakeSession(values=lambda name, step: np.float32(0.5)).loop([hook], 1)
    assert lines() == ["<0.5> 100%"]


def test_small_numbers_are_not_in_scientific_notation(lines) -> None:
    hook = LoggingTensorHook(["x"], 1)
    FakeSession(values=lambda name, step: np.array([0.0001, 1.0])).loop([hook], 1)
    assert lines() == ["x = [0.0001 1.    ]"]


@pytest.mark.parametrize("given", [{}, {"every_n_iter": 1, "every_n_secs": 1}])
def test_interval_has_to_be_one_of_two(given) -> None:
    with pytest.raises(ValueError, match="LoggingTensorHook received every_n_iter="):
        LoggingTensorHook(["loss"], **given)
    if given:
        with pytest.raises(ValueError, match="LoggingTensorHook received every_n_iter="):
            LoggingTensorHook(["loss"], at_end=True, **given)


@pytest.mark.parametrize("number", [0, -1])
def test_number_below_1_is_an_error(number) -> None:
    with pytest.raises(ValueError, match=f"every_n_iter={number} is out of range"):
        LoggingTensorHook(["loss"], every_n_iter=number)
