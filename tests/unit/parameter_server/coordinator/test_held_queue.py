"""A queue that is held while tables move to other servers."""

from __future__ import annotations

import threading

from stratagem.parameter_server.coordinator.closure_queue import ClosureQueue
from tests.unit.parameter_server.coordinator.test_closure_queue import closure, get, in_thread


def test_held_queue_starts_only_what_has_started_before() -> None:
    queue = ClosureQueue()
    put = [closure(str(i)) for i in range(3)]
    for one in put:
        queue.put(one)
    running = get(queue)
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        with queue.held():
            begun.set()
            assert over.wait(60)

    holding, _ = in_thread(hold)
    while not queue._num_holds:
        threading.Event().wait(0.001)
    taking, taken = in_thread(lambda: get(queue, 1))
    queue.put_back(running)  # its worker was lost: it starts again
    taking.join(60)
    assert taken == [running]
    assert running.num_starts == 2
    assert not begun.is_set()
    waiting, others = in_thread(lambda: get(queue, 1))
    queue.finish(running, 0)
    assert begun.wait(60)
    assert not others
    assert queue.counts == {"queued": 2, "waiting": 0, "running": 0, "done": 1}
    over.set()
    holding.join(60)
    waiting.join(60)
    assert others == [put[1]]


def test_closed_queue_is_not_waited_for() -> None:
    queue = ClosureQueue()
    queue.put(closure("bound", worker=3))
    queue.put(closure("never started", worker=4))
    running = get(queue, 3)
    holding, ended = in_thread(lambda: queue.held().__enter__())
    queue.close()
    queue.put_back(running)
    holding.join(60)
    assert ended == [None]
