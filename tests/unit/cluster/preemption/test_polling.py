"""A user's function is polled until it returns True; its errors are raised."""

from __future__ import annotations

import threading

import pytest

from stratagem.cluster.preemption.configuration import PolledSource

NAME = "stratagem-notice-poll"


def join_polls() -> None:
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(timeout=60)
            assert not thread.is_alive()


def test_function_is_asked_until_there_is_notice() -> None:
    answers = [False, False, True]
    with PolledSource(lambda: answers.pop(0), interval_s=0.001) as source:
        notice = source.wait(timeout_s=60)
        join_polls()
    assert notice is not None
    assert (notice.source, notice.grace_s) == ("termination_watcher_fn", None)
    assert notice.message == "The termination_watcher_fn returned True."
    assert (answers, source.notices) == ([], (notice,))


def test_function_is_not_called_after_stop() -> None:
    asked = threading.Event()
    calls: list[None] = []

    def watch() -> bool:
        calls.append(None)
        asked.set()
        return False

    source = PolledSource(watch, interval_s=3600)
    source.start()
    assert asked.wait(60)
    source.stop()
    join_polls()
    assert len(calls) == 1
    assert source.notice is None


def test_answer_that_comes_after_the_end_is_no_notice() -> None:
    called, released = threading.Event(), threading.Event()

    def watch() -> bool:
        called.set()
        return released.wait(60)

    with PolledSource(watch) as source:
        assert called.wait(60)
    released.set()
    join_polls()
    assert source.notice is None


def test_error_in_the_function_is_raised_where_somebody_looks() -> None:
    def watch() -> bool:
        raise LookupError("no such file: /run/notice")

    with PolledSource(watch) as source:
        with pytest.raises(LookupError, match="no such file: /run/notice"):
            source.wait(timeout_s=60)
        with pytest.raises(LookupError, match="no such file"):
            _ = source.notice


@pytest.mark.parametrize("answer", [None, "NONE", "TRUE", 2])
def test_answer_that_is_no_truth_value_is_an_error(answer) -> None:
    with (
        PolledSource(lambda: answer) as source,
        pytest.raises(TypeError, match=f"termination_watcher_fn returned {answer!r}"),
    ):
        source.wait(timeout_s=60)


@pytest.mark.parametrize("interval_s", [0, -1.0, float("inf"), float("nan")])
def test_pause_has_to_be_above_0(interval_s) -> None:
    with pytest.raises(ValueError, match=rf"interval_s={interval_s!r} is out of range"):
        PolledSource(lambda: False, interval_s=interval_s)
