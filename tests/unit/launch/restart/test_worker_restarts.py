"""Restarts of single workers: how many, and when."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.launch.restart.task_group import WorkerRestarts


def _always(worker: int) -> bool:
    return True


def _loss(restarts: WorkerRestarts, worker: int = 1, *, ran_s: float = 60.0, **loss: Any) -> str:
    return restarts.note_loss(worker, f"worker {worker}", ran_s=ran_s, now_s=100, **loss)


def test_a_worker_that_ran_for_a_while_starts_at_once_when_nothing_of_it_is_left() -> None:
    restarts = WorkerRestarts(3)
    assert _loss(restarts) == "Starting worker 1 again: restart 1 of 3."
    assert restarts.take_due(100, lambda worker: False) == []
    assert restarts.take_due(100, _always) == [1]
    assert restarts.take_due(100, _always) == []


def test_one_that_fails_early_waits_longer_each_time() -> None:
    restarts = WorkerRestarts(100)
    texts = [_loss(restarts, ran_s=1) for _ in range(7)]
    assert [text.split(" after ")[1].split(" s:")[0] for text in texts] == [
        *("1", "2", "4", "8", "16", "30", "30")
    ]
    assert restarts.take_due(129, _always) == []
    assert restarts.take_due(130, _always) == [1]
    assert " after " not in _loss(restarts, ran_s=11)  # it has run
    assert " after 1 s: " in _loss(restarts, ran_s=1)
    assert " after 1 s: " in _loss(restarts, worker=2, ran_s=1)


def test_restarts_of_all_workers_have_one_limit_which_is_reported_once() -> None:
    restarts = WorkerRestarts(2)
    assert [_loss(restarts, worker) for worker in range(4)] == [
        "Starting worker 0 again: restart 1 of 2.",
        "Starting worker 1 again: restart 2 of 2.",
        "Not starting worker 2 again: no restart of 2 is left.",
        "",
    ]
    assert restarts.take_due(100, _always) == [0, 1]


def test_one_that_was_slow_does_not_start_again_and_takes_no_restart() -> None:
    restarts = WorkerRestarts(1)
    text = _loss(restarts, was_slow=True)
    assert text == "Not starting worker 1 again while others run: it would be as slow."
    assert restarts.take_due(1000, _always) == []
    assert _loss(restarts, worker=2) == "Starting worker 2 again: restart 1 of 1."


@pytest.mark.parametrize("was_slow", [False, True])
def test_without_restarts_there_is_no_message(was_slow) -> None:
    restarts = WorkerRestarts(0)
    assert _loss(restarts, was_slow=was_slow) == ""
    assert restarts.take_due(1000, _always) == []
