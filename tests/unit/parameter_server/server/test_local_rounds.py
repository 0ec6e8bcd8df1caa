"""The count of steps in rounds of local updates."""

from __future__ import annotations

import dataclasses

import pytest

from stratagem.parameter_server.server.updates import LocalRounds, RoundCounter, UpdateMode

ROUNDS = LocalRounds(period=3, num_workers=2, num_pushes=2)


@pytest.mark.parametrize(
    ("warmup_steps", "expected"), [(0, [3, 6]), (2, [1, 2, 3, 6]), (5, [1, 2, 3, 4, 5, 6])]
)
def test_rounds_end_at_multiples_of_the_period_and_after_each_first_step(
    warmup_steps: int, expected: list[int]
) -> None:
    counter = RoundCounter(dataclasses.replace(ROUNDS, warmup_steps=warmup_steps))
    assert [step for step in range(1, 8) if counter.step()] == expected


def test_round_that_was_ended_early_is_followed_by_a_whole_one() -> None:
    counter = RoundCounter(ROUNDS)
    before = [counter.step() for _ in range(2)]
    counter.restart()
    assert [*before, *(counter.step() for _ in range(3))] == [False, False, False, False, True]


def test_mode_is_the_same_after_a_message() -> None:
    mode = UpdateMode(2, rounds=ROUNDS)
    assert UpdateMode(**dataclasses.asdict(mode)) == mode
