"""A job at a worker with a simulated dispatcher: requests, limits, and lost consumers."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import unpack_batch
from stratagem.input.service import starting
from stratagem.input.service import starting as scaling
from stratagem.input.service.client import FreeFetching, _Workers
from stratagem.input.service.job_requests import WindowLimits
from stratagem.input.service.starting import Load, Scaler, TrainerWait, load_between, workers_wanted
from stratagem.input.service.worker_job import ConsumerWishes, WorkerJob
from tests.unit.input.service.servers import LIMIT_S, input_servers

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


# A service that `start` makes, on this machine and on Ray.


def _numbers(service: sg.input.service.InputService) -> list[int]:
    distribute = sg.input.service.distribute("distributed_epoch", service.target, exactly_once=True)
    dataset = sg.input.Dataset(np.arange(90), batch_size=1).apply(distribute)
    return sorted(batch.item() for batch in dataset)


def test_workers_are_started_and_ended(monkeypatch) -> None:
    with sg.input.service.start(1) as service:
        assert service.num_workers == 1
        assert len(service.describe()["workers"]) == 1
        assert _numbers(service) == list(range(90))
    service.close()
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "1")
    with pytest.raises(sg.errors.UnavailableError, match="Input dispatcher"):
        sg.input.service.register_dataset(service.target, sg.input.Dataset([np.arange(2)]))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_ray_places_the_workers_and_starts_a_killed_one_again() -> None:
    with sg.input.service.start(2) as service:
        pids = service._workers.pids
        assert _numbers(service) == list(range(90))
        service._workers.kill(0)
        assert _numbers(service) == list(range(90))
        service._workers.add()
        assert service.num_workers == 3
        service._workers.remove()
        service._workers.remove()
        assert service.num_workers == 1
        assert _numbers(service) == list(range(90))
        assert pids[0] not in service._workers.pids


class _Slow:
    def __len__(self) -> int:
        return 400

    def __getitem__(self, number: int) -> np.ndarray:
        time.sleep(0.05)
        return np.array(number)


@pytest.mark.slow
def test_workers_are_added_while_a_trainer_waits_and_end_when_it_does_not(monkeypatch) -> None:
    monkeypatch.setattr(starting, "_SCALING_S", 0.5)
    monkeypatch.setattr(scaling.Scaler.__init__, "__defaults__", (1.0,))
    with sg.input.service.start(1, max_workers=3) as service:
        distribute = sg.input.service.distribute(
            "distributed_epoch", service.target, exactly_once=True
        )
        dataset = sg.input.Dataset(_Slow(), batch_size=1).apply(distribute)
        found, counts = [], []
        for batch in dataset:
            found.append(batch.item())
            counts.append(service.num_workers)
            time.sleep(0.01 if len(found) < 300 else 0.15)
        assert sorted(found) == list(range(400))
        assert counts[0] == 1
        assert max(counts) == 3
        deadline_s = time.monotonic() + 60
        while service.num_workers > 1:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("num_workers", "limits"),
    [(0, {}), (2, {"max_workers": 1}), (2, {"min_workers": 3}), (1, {"min_workers": 0})],
)
def test_the_number_of_workers_is_checked(num_workers, limits) -> None:
    with pytest.raises(ValueError, match=f"num_workers={num_workers} and .* are out of range"):
        sg.input.service.start(num_workers, **limits)


# Decisions on the number of workers, as tables, and a service that grows by them.

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


# Limits of what is fetched from near and far workers.


class Workers:
    """Workers of which some are on other machines."""

    def keep(self, addresses: Any) -> None:
        pass

    def is_far(self, name: str) -> bool:
        return name.startswith("far")


@pytest.mark.parametrize(
    ("live", "parts"),
    [
        (("near", "far"), {"near": 1.0, "far": 0.5}),
        (("far", "farther"), {"far": 1.0, "farther": 1.0}),
        (("near",), {"near": 1.0}),
    ],
)
def test_workers_of_other_machines_leave_room_for_near_ones(live, parts) -> None:
    fetching = FreeFetching(mock.Mock(wanted=mock.Mock(most_ahead=None)))
    fetching._workers = Workers()
    stop = threading.Event()
    for name in live:
        fetching._threads[name] = threading.Thread(target=stop.wait)
        fetching._threads[name].start()
    assert {name: fetching._part_of(name) for name in live} == parts
    stop.set()
    for thread in fetching._threads.values():
        thread.join()
    # The near ones have no more batches.
    assert all(fetching._part_of(name) == 1.0 for name in live)


def test_batches_of_far_workers_are_not_left_behind(monkeypatch) -> None:
    with input_servers(2) as servers:
        monkeypatch.setattr(_Workers, "is_far", lambda self, name: name == min(self._connections))
        dataset = sg.input.Dataset(np.arange(300), batch_size=1)
        batches = list(servers.distribute(dataset, exactly_once=True))
        assert sorted(batch.item() for batch in batches) == list(range(300))


def test_end_of_a_job_comes_while_another_consumer_takes_nothing() -> None:
    """Processes in lockstep wait for each other, also for what one of them has fetched ahead."""
    with input_servers(1) as servers:
        dataset = sg.input.Dataset(np.arange(3), batch_size=1)
        options = {"job_name": "few batches", "max_outstanding_requests": 2}
        first, second = (
            servers.distribute(dataset, exactly_once=True, **options).as_source().open(0)
            for _ in range(2)
        )
        taken = [next(first).item()]
        deadline_s = time.monotonic() + LIMIT_S
        while len(first._consumer._queue) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert list(second) == []
        taken += [batch.item() for batch in first]
        assert sorted(taken) == [0, 1, 2]


# Compression of a job: as asked for, or as the consumers' links need.


def _fields(consumer: str, compression: str | None, num_joined: int = 1) -> dict[str, Any]:
    return {
        "consumer": consumer,
        "compression": compression,
        "trainer": f"of {consumer}",
        "num_joined": num_joined,
    }


def test_auto_compresses_while_a_consumer_is_far_away() -> None:
    pytest.importorskip("zstandard")
    wishes = ConsumerWishes("AUTO")
    assert not wishes.is_compressed
    wishes.note(_fields("near", None))
    assert not wishes.is_compressed
    wishes.note(_fields("far", "zstd"))
    assert wishes.is_compressed
    wishes.keep(["near"], 0)  # sent before anyone had joined
    assert wishes.is_compressed
    wishes.keep(["near"], 1)
    assert not wishes.is_compressed
    wishes.note(_fields("near", "zstd"))
    assert wishes.is_compressed
    wishes.note(_fields("near", None))
    assert not wishes.is_compressed
    assert wishes.trainer_of("near") == "of near"


def test_auto_does_without_the_library(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    wishes = ConsumerWishes("AUTO")
    wishes.note(_fields("far", "zstd"))
    assert not wishes.is_compressed


def test_compression_by_name_needs_the_library(monkeypatch) -> None:
    wishes = ConsumerWishes(None)
    wishes.note(_fields("far", "zstd"))
    assert not wishes.is_compressed
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="compression of batches needs zstandard"):
        ConsumerWishes("zstd")
