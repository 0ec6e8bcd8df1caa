"""Synchronous updates and bounded staleness, by workers of real servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.updates import LocalRounds, Pushed, UpdateMode
from tests.unit.parameter_server.server.update_rules import Momentum

NUM_SERVERS = 2
LIMIT_S = 120.0


@pytest.fixture
def connections() -> Iterator[Connections]:
    keys = ClusterKeys.make()
    servers = [ParameterServer(keys) for _ in range(NUM_SERVERS)]
    with Connections(keys, [server.address for server in servers]) as connections:
        yield connections
    for server in servers:
        server.close()


@pytest.fixture
def worker(connections) -> Iterator[Callable[[str], Worker]]:
    workers: list[Worker] = []

    def make(name: str) -> Worker:
        workers.append(Worker(connections, name))
        return workers[-1]

    yield make
    for one in workers:
        one.thread.shutdown()


class Worker:
    """One that pulls everything and pushes gradients of one number, in a thread of its own."""

    def __init__(self, connections: Connections, name: str) -> None:
        self.served = ServerClient(connections, name)
        for placement in (V, TABLE):
            self.served.know(placement)
        self.thread = ThreadPoolExecutor(1)
        self.thread.submit(self.served.pull, ["v", "table"]).result(LIMIT_S)

    def push(self, number: float, ids: tuple[int, ...] = ()) -> Future[Pushed]:
        whole = {"v": np.full(4, number, np.float32)}
        rows = {"table": (np.array(ids, np.int64), np.full((len(ids), 2), number, np.float32))}
        return self.thread.submit(self.served.push, whole, rows, pull=["v", "table"])


# Each server has a half of both.
V = ShardLayout("v", (4,), "float32", (0, 1), (2, 2))
TABLE = ShardLayout("table", (6, 2), "float32", (0, 1), (3, 3), has_rows=True)


def start(connections: Connections, mode: UpdateMode) -> ServerClient:
    """Makes the variables, all 0."""
    served = ServerClient(connections)
    for placement in (V, TABLE):
        served.create(placement, np.zeros(placement.shape, np.float32))
    served.set_rule(Momentum(), ["v", "table"], mode)
    return served


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def wait_for(served: ServerClient, num_waiting: int) -> None:
    """Until so many workers wait at each server."""
    wait_until(
        lambda: all(state["num_waiting"] == num_waiting for state in served.describe().values())
    )


def test_all_workers_make_one_update_and_get_its_values(connections, worker) -> None:
    served = start(connections, UpdateMode(num_needed=3))
    workers = [worker(name) for name in "abc"]
    wanted_v, slot = np.zeros(4), np.zeros(4)
    for step in range(3):
        # Only one has rows, and those on one server: the other server must not wait for ever.
        futures = [
            one.push(number + 1, (5, 5) if number == step else ())
            for number, one in enumerate(workers)
        ]
        slot = 0.5 * slot + 6
        wanted_v -= 0.1 * slot
        for future in futures:
            pushed = future.result(LIMIT_S)
            assert (pushed.is_used, pushed.num_discarded) == (True, 0)
            assert pushed.version == step + 1
            np.testing.assert_allclose(pushed.values["v"], wanted_v, rtol=1e-5)
    table = served.pull(["table"])["table"]
    # Momentum of the one row that had gradients: 2, 4 and 6 times 1, in turn.
    np.testing.assert_allclose(table[5], -0.1 * (2 + 5 + 8.5), rtol=1e-5)
    assert not table[:5].any()
    assert served.staleness() == {0: 3 * 3 * NUM_SERVERS}
    assert served.discarded() == 0


def test_late_worker_learns_so_and_gets_the_new_values(connections, worker) -> None:
    served = start(connections, UpdateMode(num_needed=2))
    one, two, late = (worker(name) for name in ("one", "two", "late"))
    futures = [one.push(1.0), two.push(1.0)]
    for future in futures:
        assert future.result(LIMIT_S).is_used
    pushed = late.push(100.0).result(LIMIT_S)
    assert (pushed.is_used, pushed.num_discarded) == (False, NUM_SERVERS)
    np.testing.assert_allclose(pushed.values["v"], -0.2, rtol=1e-6)
    assert served.discarded() == NUM_SERVERS
    futures = [late.push(2.0), one.push(2.0)]  # goes on with what it was given
    assert all(future.result(LIMIT_S).is_used for future in futures)
    np.testing.assert_allclose(served.pull(["v"])["v"], -0.2 - 0.1 * (1 + 4), rtol=1e-6)


def test_gradients_that_wait_are_applied_at_the_end(connections, worker) -> None:
    served = start(connections, UpdateMode(num_needed=2))
    waiting = worker("a").push(1.0)
    wait_for(served, 1)
    assert not waiting.done()
    served.flush()
    assert waiting.result(LIMIT_S).is_used
    np.testing.assert_allclose(served.pull(["v"])["v"], -0.1, rtol=1e-6)


def test_lost_worker_is_not_waited_for(connections, worker) -> None:
    served = start(connections, UpdateMode(num_needed=3))
    one, two = worker("a"), worker("b")
    futures = [one.push(1.0), two.push(1.0)]
    wait_for(served, 2)
    served.expect(2)
    assert all(future.result(LIMIT_S).is_used for future in futures)
    assert served.pull(["v"])["v"][0] == np.float32(-0.2)
    served.expect(3)
    futures = [one.push(1.0), two.push(1.0), worker("c").push(1.0)]
    assert all(future.result(LIMIT_S).is_used for future in futures)
    assert [state["version"] for state in served.describe().values()] == [2, 2]


def test_worker_that_is_started_again_is_the_same(connections, worker) -> None:
    """Its former self waits at the servers."""
    served = start(connections, UpdateMode(num_needed=2))
    former = worker("a").push(100.0)
    wait_for(served, 1)
    new = worker("a").push(1.0)
    assert former.result(LIMIT_S).num_discarded == NUM_SERVERS
    wait_for(served, 1)
    other = worker("b").push(1.0)
    assert new.result(LIMIT_S).is_used
    assert other.result(LIMIT_S).is_used
    np.testing.assert_allclose(served.pull(["v"])["v"], -0.2, rtol=1e-6)


def test_synchronous_workers_of_several_servers_never_stall(connections, worker) -> None:
    """With a backup worker, servers choose for themselves whose gradients they use."""
    served = start(connections, UpdateMode(num_needed=2))
    workers = [worker(name) for name in "abc"]
    num_steps, discarded = 30, []

    def train(one: Worker) -> None:
        for _ in range(num_steps):
            discarded.append(one.push(1.0).result(LIMIT_S).num_discarded)

    threads = [threading.Thread(target=train, args=(one,)) for one in workers]
    for thread in threads:
        thread.start()
    # The last worker has nobody to wait for.
    while any(thread.is_alive() for thread in threads):
        if sum(thread.is_alive() for thread in threads) == 1:
            served.expect(1)
        for thread in threads:
            thread.join(0.01)
    assert len(discarded) == 3 * num_steps
    assert served.discarded() == sum(discarded)
    used = 3 * num_steps * NUM_SERVERS - sum(discarded)
    assert served.staleness() == {0: used}


def test_stale_gradients_are_not_applied(connections, worker) -> None:
    served = start(connections, UpdateMode(max_staleness=1))
    slow, quick = worker("slow"), worker("quick")
    assert quick.push(1.0).result(LIMIT_S).is_used
    assert slow.push(1.0).result(LIMIT_S).is_used  # one update later
    for _ in range(2):
        assert quick.push(1.0).result(LIMIT_S).is_used
    before = served.pull(["v", "table"])
    pushed = slow.push(100.0, (1, 4)).result(LIMIT_S)
    assert (pushed.is_used, pushed.num_discarded) == (False, NUM_SERVERS)
    for name, value in before.items():
        np.testing.assert_array_equal(pushed.values[name], value)
        np.testing.assert_array_equal(served.pull([name])[name], value)
    assert slow.push(1.0).result(LIMIT_S).is_used  # computed again from those
    assert served.discarded() == NUM_SERVERS
    assert served.staleness() == {0: 3 * NUM_SERVERS, 1: 2 * NUM_SERVERS}


def test_mode_can_be_changed_and_what_waits_is_applied(connections, worker) -> None:
    served = start(connections, UpdateMode(num_needed=2))
    waiting = worker("a").push(1.0)
    wait_for(served, 1)
    with pytest.raises(ServerError, match="is not a valid number of workers"):
        served.expect(0)
    served.set_rule(Momentum(), ["v", "table"])
    assert waiting.result(LIMIT_S).is_used
    assert worker("b").push(1.0).result(LIMIT_S).is_used
    with pytest.raises(ServerError, match="Cannot wait for 1 workers: updates are asynchronous"):
        served.expect(1)


def test_synchronous_push_that_is_sent_twice_counts_once(connections) -> None:
    served = start(connections, UpdateMode(num_needed=2))
    push = {
        worker: Message(
            "push",
            {
                "client": worker,
                "worker": worker,
                "number": 1,
                "version": 0,
                "whole": ["v/part_0"],
                "rows": [],
                "pull": ["v/part_0"],
            },
            [np.ones(2, np.float32)],
        )
        for worker in "ab"
    }
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(connections.ask, 0, push[worker]) for worker in "aab"]
        answers = [future.result(LIMIT_S) for future in futures]
    answers.append(connections.ask(0, push["a"]))
    for answer in answers:
        assert (answer.fields["version"], answer.fields["is_used"]) == (1, True)
        np.testing.assert_allclose(answer.arrays[0], -0.2, rtol=1e-6)
    assert served.discarded() == 0


@pytest.mark.parametrize("num_needed", [0, 1])
def test_worker_that_is_behind_sets_no_counter_back(connections, num_needed) -> None:
    """As for workers that train apart and both read the counter before either sent its own."""
    rounds = LocalRounds(period=4, num_workers=2, num_pushes=2 - num_needed)
    served = start(connections, UpdateMode(num_needed, rounds=rounds))
    whole = {"v": np.ones(4, np.float32)}
    for sent, kept in ((5, 6), (2, 7), (9, 10)):  # the update itself adds 1
        served.push(whole, {}, pull=["v"], scalars={"count": sent})
        assert served.scalars()["count"] == kept


def test_sums_come_before_the_update_and_late_workers_get_their_own(connections, worker) -> None:
    served = start(connections, UpdateMode(num_needed=2))
    one, two, late = (worker(name) for name in ("a", "b", "c"))

    def ask(asking: Worker, value: float) -> Future[np.ndarray]:
        asked = asking.served.sum_over_workers
        return asking.thread.submit(asked, "v", np.float32([value, 1]), 0)

    first = ask(one, 1.0)
    wait_until(lambda: served.describe()[0]["waiting"] == ["a"])
    second = ask(two, 2.0)
    for total in (first, second, ask(one, 1.0)):  # the last one as a worker that was restarted
        np.testing.assert_array_equal(total.result(LIMIT_S), [3, 2])
    assert all(future.result(LIMIT_S).is_used for future in [one.push(1.0), two.push(1.0)])
    np.testing.assert_array_equal(ask(late, 7.0).result(LIMIT_S), [7, 1])
    waiting = ask(one, 4.0)
    wait_until(lambda: served.describe()[0]["num_waiting"] == 1)
    served.flush()
    np.testing.assert_array_equal(waiting.result(LIMIT_S), [4, 1])
    served.set_rule(Momentum(), ["v"], UpdateMode())  # each worker alone
    np.testing.assert_array_equal(ask(one, 5.0).result(LIMIT_S), [5, 1])
