"""Notices stay in order, combine several sources, and wake waiting threads."""

from __future__ import annotations

import threading

import pytest

from stratagem.cluster.preemption.configuration import PolledSource
from stratagem.cluster.preemption.notices import AnySource, Notice, NoticeSource


class Told(NoticeSource):
    """A source that receives notices from the test."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._error = error

    def _listen(self) -> None:
        self.calls.append("listen")
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        self.calls.append("end")


FIRST = Notice(source="a", message="First.", heard_at_s=10.0, grace_s=5.0)
SECOND = Notice(source="b", message="Second.", heard_at_s=11.0)


def test_deadline_is_known_where_the_grace_is() -> None:
    assert FIRST.deadline_s == 15.0
    assert SECOND.deadline_s is None


def test_first_notice_stays_and_all_are_kept() -> None:
    with Told() as source:
        assert (source.notice, source.notices) == (None, ())
        assert source.wait(timeout_s=0) is None
        source.hear(FIRST)
        source.hear(SECOND)
    assert source.notice is FIRST
    assert source.notices == (FIRST, SECOND)
    assert source.wait(timeout_s=-1) is FIRST


def test_every_thread_that_waits_is_woken() -> None:
    heard: list[Notice | None] = []
    with Told() as source:
        threads = [
            threading.Thread(target=lambda: heard.append(source.wait(timeout_s=60)))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        source.hear(FIRST)
        for thread in threads:
            thread.join()
    assert heard == [FIRST] * 5


def test_error_comes_out_where_somebody_looks_unless_there_is_notice() -> None:
    error = OSError("no answer")
    with Told() as source:
        source.fail(error)
        for look in (lambda: source.notice, lambda: source.wait(timeout_s=60)):
            with pytest.raises(OSError, match="no answer") as raised:
                look()
            assert raised.value is error
        source.hear(FIRST)
        assert source.notice is FIRST


def test_error_that_is_raised_again_keeps_no_earlier_frames() -> None:
    source = Told()
    try:
        raise ValueError("the function")
    except ValueError as error:
        source.fail(error)
    counts = set[int]()
    for _ in range(3):
        with pytest.raises(ValueError, match="the function") as caught:
            _ = source.notice
        counts.add(len(caught.traceback))
    assert counts == {3}  # here twice, and in `notice`


def test_source_listens_once() -> None:
    source = Told()
    source.stop()
    assert source.calls == []
    source.start()
    source.stop()
    source.stop()
    assert source.calls == ["listen", "end"]
    with pytest.raises(RuntimeError, match="This Told was already started"):
        source.start()


def test_source_that_could_not_listen_is_not_ended() -> None:
    source = Told(OSError("no"))
    with pytest.raises(OSError, match="no"):
        source.start()
    source.stop()
    assert source.calls == ["listen"]


def test_any_of_several_sources_is_heard() -> None:
    sources = [Told(), Told()]
    with AnySource(sources) as both:
        sources[1].hear(FIRST)
        assert both.wait(timeout_s=60) is FIRST
        sources[0].hear(SECOND)
        assert both.notices == (FIRST, SECOND)
    assert [source.calls for source in sources] == [["listen", "end"]] * 2


def test_error_of_any_of_several_sources_is_raised() -> None:
    def watch() -> bool:
        raise KeyError("state")

    with (
        AnySource([Told(), PolledSource(watch)]) as both,
        pytest.raises(KeyError, match="state"),
    ):
        both.wait(timeout_s=60)


def test_sources_that_had_started_are_stopped_where_one_cannot() -> None:
    sources = [Told(), Told(OSError("no")), Told()]
    with pytest.raises(OSError, match="no"):
        AnySource(sources).start()
    assert [source.calls for source in sources] == [["listen", "end"], ["listen"], []]


def test_no_source_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="The list of notice sources is empty"):
        AnySource([])
