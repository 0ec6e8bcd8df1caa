"""StopAtStepHook stops at the right step."""

from __future__ import annotations

import pytest

from stratagem.estimator.hooks.session_run_hook import StopAtStepHook
from tests.unit.estimator.hooks.fake_loop import FakeSession


def test_num_steps_count_from_the_begin() -> None:
    session = FakeSession(global_step=10)
    assert session.loop([StopAtStepHook(num_steps=4)], 100) == 4
    assert session.global_step == 14


def test_last_step_is_the_global_step() -> None:
    session = FakeSession(global_step=10)
    assert session.loop([StopAtStepHook(last_step=13)], 100) == 3


def test_step_that_is_past_ends_after_one() -> None:
    assert FakeSession(global_step=10).loop([StopAtStepHook(last_step=5)], 100) == 1


@pytest.mark.parametrize("given", [{}, {"num_steps": 1, "last_step": 1}])
def test_neither_and_both_are_errors(given) -> None:
    with pytest.raises(ValueError, match="StopAtStepHook received num_steps="):
        StopAtStepHook(**given)
