"""Restarts of single workers: how many, and when."""

from __future__ import annotations

from stratagem.launch.restart.worker_restarts import WorkerRestarts


def _always(worker: int) -> bool:
    return True


def test_a_worker_that_ran_for_a_while_starts_at_once_when_nothing_of_it_is_left() -> None:
    restarts = WorkerRestarts(3)
    assert restarts.note_loss(1, ran_s=60, now_s=100) == 0
    assert restarts.take_due(100, lambda worker: False) == []
    assert restarts.take_due(100, _always) == [1]
    assert restarts.take_due(100, _always) == []


def test_one_that_fails_early_waits_longer_each_time() -> None:
    restarts = WorkerRestarts(100)
    delays = [restarts.note_loss(1, ran_s=1, now_s=0) for _ in range(7)]
    assert delays == [1, 2, 4, 8, 16, 30, 30]
    assert restarts.take_due(29, _always) == []
    assert restarts.take_due(30, _always) == [1]
    assert restarts.note_loss(1, ran_s=11, now_s=0) == 0  # it has run
    assert restarts.note_loss(1, ran_s=1, now_s=0) == 1
    assert restarts.note_loss(2, ran_s=1, now_s=0) == 1  # of another worker


def test_restarts_of_all_workers_have_one_limit() -> None:
    restarts = WorkerRestarts(2)
    delays = [restarts.note_loss(worker, ran_s=60, now_s=0) for worker in range(3)]
    assert delays == [0, 0, None]
    assert restarts.take_due(0, _always) == [0, 1]
