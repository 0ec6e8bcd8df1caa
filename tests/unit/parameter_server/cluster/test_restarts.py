"""When a process is started again."""

from __future__ import annotations

from stratagem.launch.processes.restarts import MAX_FAILED_STARTS, Restarts


def test_first_restart_is_at_once_and_the_next_ones_wait_longer() -> None:
    restarts = Restarts()
    delays = [restarts.delay_after_loss_s(1.0) for _ in range(10)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_process_that_has_run_for_long_is_started_again_at_once() -> None:
    restarts = Restarts()
    assert [restarts.delay_after_loss_s(s) for s in (1.0, 1.0, 3.0, 1.0)] == [0.0, 0.5, 0.0, 0.5]


def test_process_that_never_starts_is_given_up() -> None:
    restarts = Restarts()
    delays = [restarts.delay_after_failed_start_s() for _ in range(MAX_FAILED_STARTS)]
    assert delays == [0.0, 0.5, 1.0, 2.0, None]


def test_start_that_succeeds_forgets_those_that_failed() -> None:
    restarts = Restarts()
    for _ in range(3):
        for _ in range(MAX_FAILED_STARTS - 1):
            assert restarts.delay_after_failed_start_s() is not None
        restarts.started()
    assert restarts.delay_after_loss_s(100.0) == 0.0


def test_number_of_restarts_is_limited() -> None:
    assert Restarts(0).delay_after_loss_s(100.0) is None
    restarts = Restarts(2)
    assert [restarts.delay_after_loss_s(100.0) for _ in range(3)] == [0.0, 0.0, None]
