"""Steps, seconds and bytes to a loss."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.slow_links.curves import Cost, Training, num_timed_steps, target_loss
from tests.benchmarks.slow_links.trainings import training


def test_cost_of_a_loss_lies_between_two_points_in_proportion() -> None:
    one = training("lockstep", (4.0, 3.0, 2.0), step_s=0.5, step_bytes=3e6)
    assert one.cost_of(2.5) == Cost(25, 12.5, 75e6)
    assert one.cost_of(3.0) == Cost(20, 10, 60e6)
    assert one.cost_of(4.5) == Cost(10, 5, 30e6)  # before the first point nothing is known
    assert one.cost_of(1.9) is None


def test_cost_of_a_loss_that_rises_again_is_the_first() -> None:
    assert training("top-k", (4.0, 2.0, 3.0, 1.0)).cost_of(2.0) == Cost(20, 20, 20e6)


def test_target_is_two_percent_above_lockstep() -> None:
    assert target_loss([training("lockstep", (4.0, 2.0))]) == pytest.approx(2.04)


def test_seconds_are_measured_on_the_own_link_and_follow_from_steps_on_others() -> None:
    one = training("lockstep", (4.0, 2.0), step_s=0.5)
    slower = dataclasses.replace(
        one, points=tuple(dataclasses.replace(two, seconds=7.0) for two in one.points)
    )
    assert slower.own_link == "10 Gbit/s"
    assert slower.seconds_to(3.0, "10 Gbit/s") == pytest.approx(7)
    assert slower.seconds_to(3.0, "100 Mbit/s") == pytest.approx(15)
    assert slower.seconds_at(slower.points[1], "100 Mbit/s") == pytest.approx(20)
    assert slower.seconds_to(1.0, "10 Gbit/s") is None


@pytest.mark.parametrize(
    ("step_s", "step_bytes", "rate", "period", "wanted"),
    [
        (0.2, 0.0, 1e9, 1, 40),
        (0.0, 12.5e6, 1e8, 1, 8),
        (5.0, 0.0, 1e9, 1, 6),
        (1e-3, 0.0, 1e9, 1, 100),
        (0.2, 0.0, 1e9, 50, 50),
        (0.08, 0.0, 1e9, 8, 96),
        (5.0, 0.0, 1e9, 50, 50),
    ],
)
def test_timed_steps_are_seconds_of_them_in_whole_periods(
    step_s: float, step_bytes: float, rate: float, period: int, wanted: int
) -> None:
    assert num_timed_steps(step_s, step_bytes, rate, period) == wanted


def test_a_training_is_read_as_it_was_written() -> None:
    one = training("lockstep", (4.0, 2.0))
    assert Training.of(json.loads(json.dumps(dataclasses.asdict(one)))) == one
