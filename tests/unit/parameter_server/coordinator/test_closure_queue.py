"""The line of scheduled functions: what TensorFlow's own tests of its queue ask, and more."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest

from stratagem.errors import CancelledError, ClosureInputError
from stratagem.parameter_server.coordinator.closure_queue import (
    MAX_CLOSURES,
    MAX_GROUP,
    ClosureQueue,
)
from stratagem.parameter_server.coordinator.remote_value import (
    Closure,
    RemoteValue,
    RemoteValueStatus,
)


def closure(name: str = "step", **options) -> Closure:
    return Closure(None, name=name, **options)


def numbered(count: int) -> list[Closure]:
    return [closure(str(number)) for number in range(count)]


def queue_of(*put: Closure, **options) -> ClosureQueue:
    queue = ClosureQueue(**options)
    for one in put:
        queue.put(one)
    return queue


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """A thread that has begun, and what its function has returned or raised."""
    ended: list[object] = []

    def call() -> None:
        try:
            ended.append(function())
        except (CancelledError, ClosureInputError, ValueError, KeyError) as error:
            ended.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, ended


def get(queue: ClosureQueue, worker: int = 0) -> Closure:
    (got,) = queue.take(worker)
    return got


def test_closures_start_in_their_order_and_end_in_any() -> None:
    put = numbered(3)
    queue = queue_of(*put)
    assert queue.counts == {"queued": 3, "waiting": 0, "running": 0, "done": 0}
    got = [get(queue, worker) for worker in range(3)]
    assert got == put
    assert not queue.is_done()
    for value, one in enumerate(got[::-1]):
        queue.finish(one, value)
    assert [one.result.fetch() for one in put] == [2, 1, 0]
    assert queue.is_done()
    assert queue.wait()
    assert queue.counts == {"queued": 0, "waiting": 0, "running": 0, "done": 3}


def test_queue_holds_as_many_as_tensorflows() -> None:
    assert MAX_CLOSURES == 262_144


def test_put_waits_while_the_queue_is_full() -> None:
    queue = queue_of(closure(), closure(), capacity=2)
    thread, ended = in_thread(lambda: queue.put(closure()))
    thread.join(0.1)
    assert thread.is_alive()
    get(queue)
    thread.join(120)
    assert ended == [None]


def test_join_waits_for_what_runs() -> None:
    queue = queue_of(closure())
    running = get(queue)
    assert not queue.wait(timeout_s=0.05)
    thread, ended = in_thread(queue.wait)
    queue.finish(running, None)
    thread.join(120)
    assert ended == [True]


def test_closure_of_a_lost_worker_comes_first() -> None:
    first, second = closure("first"), closure("second")
    queue = queue_of(first, second)
    queue.put_back(get(queue))
    assert first.result.status is RemoteValueStatus.ABORTED
    assert first.result.error is None  # it will run again
    assert get(queue, 1) is first
    queue.finish(first, 7)
    assert first.result.fetch() == 7
    assert first.num_starts == 2


def test_closures_of_one_worker_wait_for_it() -> None:
    own, any_worker = closure("own", worker=1), closure("any")
    queue = queue_of(own, any_worker)
    assert get(queue, 0) is any_worker
    got = get(queue, 1)
    assert got is own
    queue.put_back(got)
    thread, ended = in_thread(lambda: queue.take(0))
    thread.join(0.05)
    assert ended == []
    assert get(queue, 1) is own
    queue.close()
    thread.join(120)
    assert ended == [[]]


@pytest.mark.parametrize("call", ["put", "wait"])
def test_error_is_raised_once_when_nothing_runs_any_more(call) -> None:
    put = numbered(4)
    queue = queue_of(*put)
    failing, running = get(queue, 0), get(queue, 1)
    queue.fail(failing, ValueError("the first"))
    calls = {
        "put": lambda: queue.put(closure("later")),
        "wait": queue.wait,
    }
    thread, ended = in_thread(calls[call])
    thread.join(0.05)
    assert ended == []  # one still runs
    queue.fail(running, ValueError("the second"))
    thread.join(120)
    (error,) = ended
    assert isinstance(error, ValueError)
    assert str(error) == "the first"
    assert queue.is_done()  # cleared
    with pytest.raises(ValueError, match="the first"):
        failing.result.fetch()
    with pytest.raises(ValueError, match="the second"):
        running.result.fetch()
    for one in put[2:]:
        assert one.result.status is RemoteValueStatus.ABORTED
        with pytest.raises(CancelledError, match="was cancelled before it finished"):
            one.result.fetch()
    again = closure("again")
    queue.put(again)
    queue.finish(get(queue), 1)
    assert again.result.fetch() == 1
    assert queue.wait()


def test_closure_of_a_worker_lost_after_an_error_is_cancelled() -> None:
    queue = queue_of(closure("a"), closure("b"))
    failing, lost = get(queue, 0), get(queue, 1)
    queue.fail(failing, ValueError("broken"))
    queue.put_back(lost)
    with pytest.raises(CancelledError, match="because of an error: ValueError: broken") as raised:
        lost.result.fetch()
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="broken"):
        queue.wait()


def test_put_that_waits_for_room_hears_of_an_error() -> None:
    queue = queue_of(closure(), capacity=1)
    running = get(queue)
    queue.put(closure())
    thread, ended = in_thread(lambda: queue.put(closure()))
    thread.join(0.05)
    queue.fail(running, ValueError("broken"))
    thread.join(120)
    assert [str(error) for error in ended] == ["broken"]


def test_input_that_is_not_there_is_waited_for() -> None:
    first = closure("first")
    second = closure("second", inputs=[first.result, first.result])
    queue = queue_of(first, second)
    assert queue.counts["waiting"] == 1
    queue.put_back(get(queue))  # its worker is lost: the other goes on waiting
    assert queue.counts["waiting"] == 1
    running = get(queue)
    assert not queue.is_done()
    queue.finish(running, 3)
    assert get(queue) is second
    third = closure("third", inputs=[first.result])
    queue.put(third)
    assert get(queue) is third  # at once


def test_error_comes_before_what_follows_from_it() -> None:
    first = closure("first")
    second = closure("second", inputs=[first.result])
    queue = queue_of(first, second)
    queue.fail(get(queue), KeyError("gone"))
    with pytest.raises(KeyError):
        queue.wait()
    with pytest.raises(CancelledError):
        second.result.fetch()


def test_loss_of_a_server_ends_all() -> None:
    queue = queue_of(closure(), closure())
    running = get(queue)
    queue.break_all(ConnectionError("server 0"))
    queue.put_back(running)
    with pytest.raises(ConnectionError, match="server 0"):
        queue.wait()


def test_whether_all_is_done_is_answered_at_once() -> None:
    queue = queue_of(closure("a"), closure("b"))
    failing, running = get(queue, 0), get(queue, 1)
    queue.fail(failing, ValueError("the first"))
    thread, ended = in_thread(queue.is_done)
    thread.join(120)
    assert ended == [False]  # one still runs
    queue.finish(running, None)
    with pytest.raises(ValueError, match="the first"):
        queue.is_done()
    assert queue.is_done()


def test_errors_that_are_raised_again_keep_no_earlier_frames() -> None:
    queue, failed = ClosureQueue(), RemoteValue()
    lost_for_good(queue)
    try:
        raise ValueError("a function")
    except ValueError as error:
        failed.abort(error)
    for raise_again in (lambda: queue.put(closure(worker=1)), failed.fetch):
        counts = set[int]()
        for _ in range(3):
            with pytest.raises((ConnectionError, ValueError)) as caught:
                raise_again()
            counts.add(len(caught.traceback))
        assert len(counts) == 1
    here, *library, first = [frame.name for frame in caught.traceback]
    assert (library, first) == (["fetch", "_wait"], here)  # the first traceback is kept


def lost_for_good(queue: ClosureQueue) -> None:
    queue.lose_worker(1, ConnectionError("worker 1"))


def test_put_after_the_loss_of_all_workers_raises_why() -> None:
    queue = ClosureQueue()
    queue.lose_worker(0, ConnectionError("worker 0"))
    queue.lose_worker(None, ConnectionError("the last worker"))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the last worker"):
            queue.put(closure())
    queue.find_worker(0)
    queue.put(closure())
    queue.finish(get(queue, 0), None)
    assert queue.wait(timeout_s=120)


@pytest.mark.parametrize("state", ["queued", "running", "waiting"])
def test_what_only_a_worker_that_is_gone_may_run_does_not_hang(state) -> None:
    first = closure("first", worker=0)
    own = closure("own", worker=1, inputs=[first.result] if state == "waiting" else [])
    queue = queue_of(first, own)
    if state == "running":
        get(queue, 1)
    lost_for_good(queue)
    if state == "running":
        queue.put_back(own)
    if state == "waiting":
        queue.finish(get(queue, 0), None)
    with pytest.raises(ConnectionError, match="worker 1"):
        queue.wait(timeout_s=120)
    with pytest.raises((ConnectionError, CancelledError)):
        own.result.fetch()
    again = closure("again", worker=0)  # the others go on
    queue.put(again)
    queue.finish(get(queue, 0), 1)
    assert queue.wait(timeout_s=120)


def test_many_workers_run_each_closure_once() -> None:
    queue = ClosureQueue(capacity=8)

    def work(worker: int) -> None:
        while taken := queue.take(worker):
            (one,) = taken
            if one.num_starts == 1 and int(one.name) % 7 == 0:
                queue.put_back(one)
            else:
                queue.finish(one, int(one.name) ** 2)

    workers = [in_thread(lambda i=i: work(i))[0] for i in range(4)]
    put = numbered(500)
    for one in put:
        queue.put(one)
    assert queue.wait(timeout_s=60)
    queue.close()
    for thread in workers:
        thread.join(120)
    assert [one.result.fetch() for one in put] == [i**2 for i in range(500)]


def test_remote_value_tells_at_once_or_later() -> None:
    value, seen = RemoteValue(), []
    value.observe(seen.append)
    value.abort(None)
    assert seen == []
    assert repr(value) == "RemoteValue(ABORTED)"
    value.set_value(1)
    value.observe(seen.append)
    assert seen == [value, value]


def names(taken: list[Closure]) -> str:
    return "".join(one.name for one in taken)


@pytest.mark.parametrize("worker", [None, 0])
def test_short_closures_are_taken_together(worker) -> None:
    """Half of those left, as many as fit into 2 ms, and none after a long one."""
    queue = queue_of(*(closure(name, worker=worker) for name in "aabacaaaaaaaaab"))
    queue.num_workers = 2

    def take() -> str:
        taken = queue.take(0, expected_s=lambda one: {"a": 3e-4, "b": 1.0, "c": math.inf}[one.name])
        for one in taken:
            assert one.num_starts == 1
            queue.finish(one, None)
        return names(taken)

    assert queue.counts["queued"] == 15
    assert [take() for _ in range(4)] == ["aa", "b", "a", "c"]
    assert [take() for _ in range(3)] == ["aaaaa", "aaa", "a"]
    assert queue.counts == {"queued": 1, "waiting": 0, "running": 0, "done": 14}
    assert take() == "b"
    assert queue.is_done()


def test_group_has_a_limit() -> None:
    queue = queue_of(*numbered(4 * MAX_GROUP))
    assert len(queue.take(0, expected_s=lambda _: 0.0)) == MAX_GROUP
    assert len(queue.take(0)) == 1


@pytest.mark.parametrize(
    ("duration_s", "num_workers", "sizes"),
    [
        (0.016, 2, [1, 1]),
        (0.01, 2, [3, 3]),
        (0.01, 8, [1, 1]),
        (1e-3, 8, [2, 2]),
        (1e-4, 8, [8, 4]),
    ],
)
def test_longer_group_is_a_share_of_the_queue(duration_s, num_workers, sizes) -> None:
    queue = queue_of(*numbered(16))
    queue.num_workers = num_workers
    taken = [queue.take(worker, expected_s=lambda _: duration_s) for worker in range(2)]
    assert [*map(len, taken)] == sizes


def test_group_of_a_lost_worker_is_put_back_in_its_order() -> None:
    put = numbered(8)
    queue = queue_of(*put)
    for one in reversed(queue.take(0, expected_s=lambda _: 0.0)):
        queue.put_back(one)
    assert [get(queue) for _ in put] == put


def test_busy_worker_leaves_the_last_closures_to_idle_ones() -> None:
    queue = ClosureQueue()
    queue.num_workers = 2
    is_busy = True
    thread, ended = in_thread(lambda: queue.take(0, lambda: is_busy))
    running = closure("running")
    queue.put(running)
    assert queue.take(0) == [running]
    left = [closure("left"), closure("left too")]
    for one in left:
        queue.put(one)
    thread.join(0.05)
    assert ended == []
    assert get(queue, 1) is left[0]
    is_busy = False
    queue.finish(running, None)
    thread.join(120)
    assert ended == [[left[1]]]


def test_busy_worker_takes_more_than_idle_ones_can() -> None:
    queue = ClosureQueue()
    queue.num_workers = 2
    thread, ended = in_thread(lambda: queue.take(0, lambda: True))
    put = numbered(3)
    for one in put:
        assert ended == []
        queue.put(one)
    thread.join(120)
    assert ended == [put[:1]]


def test_many_waiting_workers_take_what_comes() -> None:
    queue = ClosureQueue()
    queue.num_workers = 32
    taken: list[Closure] = []

    def work(worker: int) -> None:
        while got := queue.take(worker, expected_s=lambda _: 1e-4):
            for one in got:
                taken.append(one)
                queue.finish(one, None)

    workers = [in_thread(lambda i=i: work(i))[0] for i in range(32)]
    put = [closure(worker=i % 32 if i % 3 == 0 else None) for i in range(1000)]
    for one in put:
        queue.put(one)
    assert queue.wait(timeout_s=60)
    queue.close()
    for thread in workers:
        thread.join(120)
    assert set(taken) == set(put)
    assert len(taken) == len(put)
