"""How often the state is kept in memory, by a clock that the test sets."""

from __future__ import annotations

import pytest

from stratagem.keras.callbacks import backup_and_restore as keeping_pace
from stratagem.keras.callbacks.backup_and_restore import SnapshotInterval


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(keeping_pace, "time", clock)
    return clock


def calls(
    interval: SnapshotInterval,
    clock: Clock,
    num: int,
    *,
    call_s: float,
    cost_s: float,
    batches: int = 1,
) -> list[int]:
    """After which of these calls the state was kept."""
    kept: list[int] = []
    for call in range(1, num + 1):
        clock.now_s += call_s
        if interval.is_due(batches):
            clock.now_s += cost_s
            interval.note(cost_s)
            kept.append(call)
    return kept


@pytest.mark.parametrize(
    ("batches", "kept"), [(1, [3, 6, 9]), (2, [2, 4, 6, 8, 10]), (5, [*range(1, 11)])]
)
def test_every_few_batches(clock: Clock, batches: int, kept: list[int]) -> None:
    interval = SnapshotInterval(3)
    assert calls(interval, clock, 10, call_s=0.1, cost_s=9.0, batches=batches) == kept
    interval.end_epoch()
    assert interval.num_batches == 3


@pytest.mark.parametrize(("batches", "num_batches"), [(1, 30), (4, 120)])
def test_takes_a_two_hundredth_of_the_time(clock: Clock, batches: int, num_batches: int) -> None:
    """Fifteen hundredths of a call are a two-hundredth of thirty calls."""
    interval = SnapshotInterval("auto")
    first = calls(interval, clock, 16, call_s=0.125, cost_s=0.0187, batches=batches)
    assert first == list(range(1, 16))  # while it is measured
    assert interval.num_batches == num_batches
    assert calls(interval, clock, 75, call_s=0.125, cost_s=0.0187, batches=batches) == [29, 59]
    interval.end_epoch()
    assert calls(interval, clock, 40, call_s=0.125, cost_s=0.0187, batches=batches) == [30]


def test_each_batch_where_batches_are_long(clock: Clock) -> None:
    interval = SnapshotInterval("auto")
    assert calls(interval, clock, 40, call_s=2.0, cost_s=0.01) == list(range(1, 41))


def test_follows_what_changes_at_the_end_of_an_epoch(clock: Clock) -> None:
    interval = SnapshotInterval("auto")
    calls(interval, clock, 40, call_s=0.125, cost_s=0.06)
    assert interval.num_batches == 96
    clock.now_s += 1000.0  # an evaluation
    interval.end_epoch()
    clock.now_s += 1000.0
    calls(interval, clock, 900, call_s=2.0, cost_s=0.06)
    interval.end_epoch()
    assert interval.num_batches == 96  # soon after the first decision
    calls(interval, clock, 100, call_s=2.0, cost_s=0.06)
    assert interval.num_batches == 96  # within an epoch
    interval.end_epoch()
    assert interval.num_batches == 6


def test_where_nothing_was_measured_each_batch_is_kept(clock: Clock) -> None:
    interval = SnapshotInterval("auto")
    for _ in range(2000):
        assert interval.is_due(1)
    interval.end_epoch()
    assert interval.num_batches == 1
