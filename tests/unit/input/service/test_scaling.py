"""Decisions on the number of workers, as tables, and a service that grows by them."""

from __future__ import annotations

import math

import pytest

from stratagem.input.service.starting import Load, Scaler, TrainerWait, load_between, workers_wanted

# A trainer that would take 10 batches per second: starved at 2 per second, and content.
STARVED = TrainerWait(num_batches=20, busy_s=2.0, wait_s=8.0)
CONTENT = TrainerWait(num_batches=100, busy_s=9.9, wait_s=0.1)
ONLY_WAITED = TrainerWait(num_batches=0, busy_s=0.0, wait_s=10.0)
IDLE = TrainerWait(num_batches=0, busy_s=10.0, wait_s=0.0)


@pytest.mark.parametrize(
    ("rates", "waits", "current", "wanted"),
    [
        # Five workers of 2 per second feed 10 per second.
        ([2.0], [STARVED], 1, 2),
        ([2.0] * 4, [STARVED], 4, 5),
        ([2.0] * 5, [STARVED], 5, 5),  # It waits for something else, such as the network.
        ([2.0] * 5, [CONTENT], 5, 5),
        ([2.0] * 7, [CONTENT], 7, 6),
        ([2.0] * 6, [CONTENT], 6, 6),  # Five have just enough: they keep a tenth free.
        # Two trainers need twice as many.
        ([2.0] * 7, [CONTENT, CONTENT], 7, 7),
        ([2.0] * 7, [STARVED, CONTENT], 7, 8),
        # Rates differ: their mean counts.
        ([1.0, 3.0], [STARVED], 2, 3),
        # Before the first batch of an epoch nothing is known; of a slow one, enough.
        ([], [ONLY_WAITED], 1, 1),
        ([0.1], [ONLY_WAITED], 1, 2),
        # Nobody reads.
        ([2.0] * 3, [IDLE], 3, 2),
        ([], [], 3, 2),
        ([], [], 1, 1),
        ([2.0] * 8, [STARVED, STARVED], 8, 8),  # the largest number
        ([9.0] * 12, [], 12, 8),
    ],
)
def test_number_of_workers(rates, waits, current, wanted) -> None:
    assert workers_wanted(rates, waits, current, 1, 8) == wanted


def test_rates_without_waiting() -> None:
    assert STARVED.rate == 10.0
    assert ONLY_WAITED.rate == math.inf
    assert (IDLE.rate, IDLE.is_starved, TrainerWait(0, 0.0, 0.0).rate) == (0.0, False, 0.0)


def test_growth_is_at_once_and_shrinkage_after_a_quiet_time() -> None:
    scaler = Scaler(1, 4, quiet_s=60)
    starved, idle = Load([2.0], [STARVED]), Load([2.0], [IDLE])
    assert [scaler.decide(starved, current, 0.0) for current in (1, 2, 3, 4)] == [2, 3, 4, 4]
    assert [scaler.decide(idle, 4, now_s) for now_s in (10.0, 69.0, 70.0)] == [4, 4, 3]
    assert [scaler.decide(idle, 3, now_s) for now_s in (71.0, 129.0, 130.0)] == [3, 3, 2]
    assert scaler.decide(starved, 2, 131.0) == 3
    assert [scaler.decide(idle, 3, now_s) for now_s in (132.0, 191.0, 192.0)] == [3, 3, 2]


def _described(num_read: int, read_s: float, num_batches: int, wait_s: float, age_s: float):
    consumer = {"num_batches": num_batches, "wait_s": wait_s, "age_s": age_s}
    return {
        "workers": {
            "a": {"num_read": num_read, "read_s": read_s},
            "idle": {"num_read": 5, "read_s": 1.0},
        },
        "jobs": [
            {"policy": "DYNAMIC", "consumers": {"c": consumer}},
            {"policy": "OFF", "consumers": {"d": consumer}},
        ],
    }


def test_load_is_what_happened_between_two_descriptions() -> None:
    before = _described(10, 5.0, 100, 1.0, 20.0)
    after = _described(16, 8.0, 120, 3.0, 30.0)
    after["workers"]["new"] = {"num_read": 9, "read_s": 1.0}
    after["jobs"][0]["consumers"]["new"] = {"num_batches": 1, "wait_s": 0.0, "age_s": 1.0}
    assert load_between(before, after) == Load([2.0], [TrainerWait(20, 8.0, 2.0)])
