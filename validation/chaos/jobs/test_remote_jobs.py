"""Verdict on the steps that a remote function counted."""

from __future__ import annotations

import pytest

from validation.chaos.jobs.remote_jobs import wrong_steps


def _lines(*steps: int) -> str:
    return "".join(f"{step} 17 0.5\n" for step in steps)


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ((0, 1, 2), ""),
        ((0, 1), "step None was counted where 2 is expected"),
        ((0, 1, 1, 2), "step 1 was counted where 2 is expected"),
        ((0, 2), "step 2 was counted where 1 is expected"),
        ((0, 1, 2, 3), "step 3 was counted where None is expected"),
    ],
)
def test_each_step_is_counted_once_and_in_order(steps, wrong) -> None:
    assert wrong_steps(_lines(*steps), 3) == wrong
