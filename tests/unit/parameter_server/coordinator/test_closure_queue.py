"""The line of scheduled functions: what TensorFlow's own tests of its queue ask, and more."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stratagem.errors import CancelledError, ClosureInputError
from stratagem.parameter_server.coordinator.closure_queue import (
    MAX_GROUP,
    ClosureQueue,
)
from stratagem.parameter_server.coordinator.remote_value import (
    Closure,
    RemoteValue,
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


class Line(RuleBasedStateMachine):
    """A queue beside lists: `line` by worker, None for any; `ended` has values and errors."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ClosureQueue()
        self.every: list[Closure] = []
        self.inputs: dict[Closure, list[Closure]] = {}
        self.line: dict[int | None, list[Closure]] = {None: [], 0: [], 1: []}
        self.waiting: list[Closure] = []
        self.running: list[Closure] = []
        self.ended: dict[Closure, Any] = {}
        self.gone: dict[int | None, Exception] = {}
        self.error: Any = None  # that is to be raised, or its class
        self.num_done = 0

    @property
    def unstarted(self) -> list[Closure]:
        return [*self.waiting, *itertools.chain(*self.line.values())]

    def give_up(self, error: Any) -> None:
        self.error = self.error or error
        self.ended.update(dict.fromkeys(self.unstarted, CancelledError))
        self.waiting.clear()
        for line in self.line.values():
            line.clear()

    def start(self) -> None:
        """Queues those whose inputs have ended."""
        for one in [*self.waiting]:
            if one not in self.waiting or any(own not in self.ended for own in self.inputs[one]):
                continue
            self.waiting.remove(one)
            have_failed = any(not own.is_done for own in self.inputs[one])
            error = ClosureInputError if have_failed else self.gone.get(one.worker)
            if error is None:
                self.line[one.worker].append(one)
            else:
                self.ended[one] = error
                self.give_up(error)

    def require_error(self, call: Callable[[], object]) -> None:
        """The error of a closure is raised once."""
        error, self.error = self.error, None
        with pytest.raises(error if isinstance(error, type) else type(error)) as raised:
            call()
        assert isinstance(error, type) or raised.value is error

    @precondition(lambda self: not (self.error and self.running))  # it would wait for these
    @rule(worker=st.sampled_from([None, 0, 1]), data=st.data())
    def put(self, worker: int | None, data: st.DataObject) -> None:
        inputs = data.draw(st.lists(st.sampled_from(self.every), max_size=2)) if self.every else []
        results = [one.result for one in inputs]
        one = closure(str(len(self.every)), worker=worker, inputs=results)
        if self.error:
            self.require_error(lambda: self.queue.put(one))
        elif worker in self.gone:
            with pytest.raises(ConnectionError, match=f"worker {worker}"):
                self.queue.put(one)
        else:
            self.queue.put(one)
            self.every.append(one)
            self.inputs[one] = inputs
            self.waiting.append(one)
            self.start()

    @rule(worker=st.sampled_from([0, 1]))
    def take(self, worker: int) -> None:
        if line := self.line[worker] or self.line[None]:
            self.running.append(line.pop(0))
            assert self.queue.take(worker) == self.running[-1:]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "fail", "put back"]))
    def end(self, data: st.DataObject, how: str) -> None:
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        if how == "finish":
            self.queue.finish(one, one.name)
            self.ended[one], self.num_done = one.name, self.num_done + 1
            self.start()
        elif how == "fail":
            error = ValueError(one.name)
            self.queue.fail(one, error)
            self.ended[one] = error
            self.give_up(error)
        else:  # its worker was lost
            self.queue.put_back(one)
            if self.error:
                self.ended[one] = CancelledError
                return
            self.line[one.worker].insert(0, one)
            if one.worker in self.gone:
                self.give_up(self.gone[one.worker])

    @rule(worker=st.sampled_from([0, 1, 0, 1, None]), is_lost=st.booleans())
    def lose_or_find(self, worker: int | None, is_lost: bool) -> None:
        if is_lost:
            error = self.gone[worker] = ConnectionError(f"worker {worker}")
            self.queue.lose_worker(worker, error)
            if worker is None or self.line[worker]:
                self.give_up(error)
        elif worker is not None:
            self.queue.find_worker(worker)
            self.gone.pop(worker, None)
            self.gone.pop(None, None)

    @rule(is_waiting=st.booleans())
    def look(self, is_waiting: bool) -> None:
        call = (lambda: self.queue.wait(timeout_s=0)) if is_waiting else self.queue.is_done
        if self.error and not self.running:
            self.require_error(call)
        else:
            assert call() == (not self.unstarted and not self.running)

    @invariant()
    def results_are_those_of_the_lists(self) -> None:
        assert self.queue.counts == {
            "queued": sum(map(len, self.line.values())),
            "waiting": len(self.waiting),
            "running": len(self.running),
            "done": self.num_done,
        }
        for one in self.every:
            wanted = self.ended.get(one)
            if isinstance(wanted, str):
                assert one.result.fetch() == wanted
            elif wanted is None:  # or it will run again
                assert (one.is_done, one.result.error) == (False, None)
            else:
                kind = wanted if isinstance(wanted, type) else type(wanted)
                with pytest.raises(kind):
                    one.result.fetch()

    def teardown(self) -> None:
        self.queue.close()


def test_queue_is_a_line_of_lists() -> None:
    chosen = settings(max_examples=100, stateful_step_count=40)
    run_state_machine_as_test(Line, settings=chosen)


def test_put_waits_while_the_queue_is_full_and_hears_of_an_error() -> None:
    queue = queue_of(closure(), closure(), capacity=2)
    thread, ended = in_thread(lambda: queue.put(closure()))
    thread.join(0.1)
    assert thread.is_alive()
    running = get(queue)
    thread.join(120)
    assert ended == [None]
    thread, ended = in_thread(lambda: queue.put(closure()))
    thread.join(0.05)
    queue.fail(running, ValueError("broken"))
    thread.join(120)
    assert [str(error) for error in ended] == ["broken"]


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


def test_errors_that_are_raised_again_keep_no_earlier_frames() -> None:
    queue, failed = ClosureQueue(), RemoteValue()
    queue.lose_worker(1, ConnectionError("worker 1"))
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
        return "".join(one.name for one in taken)

    assert queue.counts["queued"] == 15
    assert [take() for _ in range(4)] == ["aa", "b", "a", "c"]
    assert [take() for _ in range(3)] == ["aaaaa", "aaa", "a"]
    assert queue.counts == {"queued": 1, "waiting": 0, "running": 0, "done": 14}
    assert take() == "b"
    assert queue.is_done()


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
    many = queue_of(*numbered(4 * MAX_GROUP))
    assert len(many.take(0, expected_s=lambda _: 0.0)) == MAX_GROUP
    assert len(many.take(0)) == 1


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
    for one in left:
        queue.finish(one, None)
    thread, ended = in_thread(lambda: queue.take(0, lambda: True))
    put = numbered(3)  # more than idle ones can take
    for one in put:
        assert ended == []
        queue.put(one)
    thread.join(120)
    assert ended == [put[:1]]
