"""A job at a worker with a simulated dispatcher: requests, limits, and lost consumers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import unpack_batch
from stratagem.input.service.job_requests import WindowLimits
from stratagem.input.service.worker_job import WorkerJob

_LIMIT_S = 120


class _Dispatcher:
    """Gives out splits 0 and 1, and then none."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._left = [0, 1]

    def ask(self, message: Message) -> Message:
        self.messages.append(message)
        if message.kind != "next_split":
            return Message("noted")
        if not self._left:
            time.sleep(0.01)
            return Message("wait")
        split = self._left.pop(0)
        return Message("split", {"split": split, "attempt": 0, "received": []})


def _job(
    dispatcher: _Dispatcher, limits: WindowLimits, num_bytes: int = 8, **spec: Any
) -> WorkerJob:
    source = sg.input.Dataset(np.zeros((6, num_bytes), np.uint8), batch_size=1).as_source()
    spec = {
        "plan": {"kind": "ranges", "count": 2, "size": 3},
        "epoch": 0,
        "num_consumers": None,
        "is_exact": True,
        "compression": "AUTO",
        "is_shared": False,
        "skip_errors": 0,
        **spec,
    }
    return WorkerJob("r", spec, source, worker="w", ask=dispatcher.ask, limits=limits)


def _asked(method: Callable[[Request], None], **fields: Any) -> list[Any]:
    """Returns a list that gets the answer, as (split, index) or its kind."""
    answers: list[Any] = []

    def answer(message: Message) -> None:
        fields = message.fields
        answers.append((fields["split"], fields["index"]) if "split" in fields else message.kind)

    method(
        Request(
            Message("ask", {"compression": None, "trainer": None, "num_joined": 1, **fields}),
            answer,
        )
    )
    return answers


def _wait(is_true: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def _next(job: WorkerJob, consumer: str, number: int) -> Any:
    answers = _asked(job.next_batch, consumer=consumer, number=number)
    _wait(lambda: answers)
    return answers[0]


def test_a_request_that_is_sent_again_gets_the_same_batch() -> None:
    job = _job(_Dispatcher(), WindowLimits())
    assert [_next(job, "c", number) for number in (1, 1, 2, 2, 2, 3)] == [
        (0, 0), (0, 0), (0, 1), (0, 1), (0, 1), (0, 2),
    ]  # fmt: skip
    job.close()
    assert _next(job, "c", 4) == "end"


def test_a_split_is_reported_once_its_last_batch_is_confirmed() -> None:
    dispatcher = _Dispatcher()
    job = _job(dispatcher, WindowLimits())

    def reported() -> list[int]:
        return [one.fields["split"] for one in dispatcher.messages if one.kind == "done_split"]

    for number in range(1, 4):
        _next(job, "c", number)
    time.sleep(0.05)
    assert reported() == []
    assert _next(job, "c", 4) == (1, 0)
    _wait(lambda: reported() == [0])
    job.close()


def test_what_a_lost_consumer_had_not_confirmed_goes_to_others_in_exact_jobs() -> None:
    spec: dict[str, Any] = {"consumers": ["d"], "num_joined": 1, "wanted": []}
    job = _job(_Dispatcher(), WindowLimits())
    assert [_next(job, "c", 1), _next(job, "d", 1)] == [(0, 0), (0, 1)]
    job.update(spec)
    assert _next(job, "d", 2) == (0, 0)
    job.close()
    job = _job(_Dispatcher(), WindowLimits(), is_exact=False)
    assert [_next(job, "c", 1), _next(job, "d", 1)] == [(0, 0), (0, 1)]
    job.update(spec)
    assert _next(job, "d", 2) == (0, 2)
    job.close()


def test_a_consumer_that_joined_after_the_news_were_sent_is_not_lost() -> None:
    """Otherwise another one would get the batch, too."""
    job = _job(_Dispatcher(), WindowLimits())
    answers = _asked(job.next_batch, consumer="new", number=1, num_joined=2)
    _wait(lambda: answers)
    assert answers == [(0, 0)]
    job.update({"consumers": ["d"], "num_joined": 1, "wanted": []})
    assert _next(job, "d", 1) == (0, 1)
    job.update({"consumers": ["d"], "num_joined": 2, "wanted": []})
    assert _next(job, "d", 2) == (0, 0)
    job.close()


def test_it_reads_ahead_as_far_as_the_limits() -> None:
    for limits, expected in (
        (WindowLimits(2), 2),
        (WindowLimits(9, 2**14), 3),
        (WindowLimits(9, 1), 1),
    ):
        job = _job(_Dispatcher(), limits, num_bytes=2**13 - 1 if expected == 3 else 8)
        _wait(lambda job=job, expected=expected: job._window_batches == expected)
        time.sleep(0.05)  # in which it reads no further
        assert job._window_batches == expected
        job.close()


def test_a_revoked_split_is_dropped_and_reported() -> None:
    dispatcher = _Dispatcher()
    job = _job(dispatcher, WindowLimits(1))
    assert _next(job, "c", 1) == (0, 0)
    job.revoke(0, 7)  # another attempt
    job.revoke(0, 0)
    assert _next(job, "c", 2) == (1, 0)
    reports = [one.fields for one in dispatcher.messages if one.kind == "report"]
    assert [(one["reporter"], one["split"], one["attempt"]) for one in reports] == [("w", 0, 1)]
    job.close()


def test_a_wanted_split_is_read_beside_a_full_window() -> None:
    job = _job(_Dispatcher(), WindowLimits(1), num_consumers=1)
    answers = _asked(job.batch_at, consumer="c", split=1, index=0)
    _wait(lambda: job._num_blocked == 1)
    assert answers == ["moved"]  # nobody has it yet
    job.update({"consumers": ["c"], "num_joined": 1, "wanted": [1]})
    _wait(lambda: 1 in job._held)
    answers = _asked(job.batch_at, consumer="c", split=1, index=0)
    _wait(lambda: answers)
    assert answers == [(1, 0)]
    job.close()


def test_a_split_that_is_waited_for_is_read_though_others_fill_the_window() -> None:
    """The reader has the split already, so that no other thread is started for it."""
    dispatcher = _Dispatcher()
    job = _job(dispatcher, WindowLimits(most_batches=3), num_consumers=1)
    _wait(lambda: not dispatcher._left)  # split 0 fills the window, and split 1 is begun
    for index in range(3):
        answers = _asked(job.batch_at, split=1, index=index, consumer="c")
        _wait(lambda answers=answers: answers)
        assert answers == [(1, index)]
    job.close()


def test_batches_are_compressed_for_consumers_elsewhere() -> None:
    pytest.importorskip("zstandard")
    job = _job(_Dispatcher(), WindowLimits(most_batches=1), num_bytes=2**16)
    found: list[bool] = []

    def answer(message: Message) -> None:
        found.append("compressed" in message.fields)
        np.testing.assert_array_equal(unpack_batch(message), np.zeros((1, 2**16)))

    # The last batch is packed after request 5, which makes room for the one before.
    wishes = [None, None, None, "zstd", "zstd", "zstd"]
    for number, wish in enumerate(wishes, 1):
        fields = {"consumer": "c", "number": number, "trainer": None, "compression": wish}
        job.next_batch(Request(Message("next_batch", fields), answer))
        _wait(lambda count=number: len(found) == count)
    job.close()
    assert not found[0]
    assert found[5]


@pytest.mark.parametrize(("compression", "is_compressed"), [("zstd", True), (None, False)])
def test_compression_that_was_asked_for_is_always_used(compression, is_compressed) -> None:
    pytest.importorskip("zstandard")
    job = _job(_Dispatcher(), WindowLimits(), num_bytes=2**16, compression=compression)
    found: list[Message] = []
    fields = {
        "consumer": "c",
        "number": 1,
        "trainer": None,
        "compression": None if is_compressed else "zstd",
    }
    job.next_batch(Request(Message("next_batch", fields), found.append))
    _wait(lambda: found)
    job.close()
    assert ("compressed" in found[0].fields) == is_compressed
