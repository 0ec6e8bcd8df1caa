"""What one server does with its variables; synchronous and stale updates, and sums of rows."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout, layout_of_keys
from stratagem.parameter_server.server import shards
from stratagem.parameter_server.server.changes import Lifetime
from stratagem.parameter_server.server.pushes import Contribution, Pushes
from stratagem.parameter_server.server.shards import (
    Pushed,
    Shard,
    ShardSpec,
    State,
    UpdateMode,
    aligned_empty,
    combine_rows,
    made_in_pieces,
    sum_rows,
)
from stratagem.parameter_server.server.store import ServerVariables
from tests.unit.launch.waiting import until
from tests.unit.parameter_server.client.test_client import connected
from tests.unit.parameter_server.server.test_server import LIMIT_S
from tests.unit.parameter_server.server.update_rules import Momentum, num_discarded

NUM_SERVERS = 2


@pytest.fixture
def connections() -> Iterator[Connections]:
    with connected(NUM_SERVERS) as made:
        yield made


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


def wait_for(served: ServerClient, num_waiting: int) -> None:
    """Until so many workers wait at each server."""
    states = served.describe
    until(lambda: all(len(one["waiting"]) == num_waiting for one in states().values()))


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
    assert num_discarded(served) == 0


def test_late_worker_learns_so_and_gets_the_new_values(connections, worker) -> None:
    served = start(connections, UpdateMode(num_needed=2))
    one, two, late = (worker(name) for name in ("one", "two", "late"))
    futures = [one.push(1.0), two.push(1.0)]
    for future in futures:
        assert future.result(LIMIT_S).is_used
    pushed = late.push(100.0).result(LIMIT_S)
    assert (pushed.is_used, pushed.num_discarded) == (False, NUM_SERVERS)
    np.testing.assert_allclose(pushed.values["v"], -0.2, rtol=1e-6)
    assert num_discarded(served) == NUM_SERVERS
    futures = [late.push(2.0), one.push(2.0)]  # goes on with what it was given
    assert all(future.result(LIMIT_S).is_used for future in futures)
    np.testing.assert_allclose(served.pull(["v"])["v"], -0.2 - 0.1 * (1 + 4), rtol=1e-6)


def test_gradients_that_wait_are_applied_at_the_end(connections, worker) -> None:
    served = start(connections, UpdateMode(num_needed=2))
    served.flush()
    assert [state["version"] for state in served.describe().values()] == [0, 0]
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
    assert num_discarded(served) == sum(discarded)
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
    assert num_discarded(served) == NUM_SERVERS
    assert served.staleness() == {0: 3 * NUM_SERVERS, 1: 2 * NUM_SERVERS}


def test_mode_can_be_changed_and_what_waits_is_applied(connections, worker) -> None:
    served = start(connections, UpdateMode(num_needed=2))
    waiting = worker("a").push(1.0)
    wait_for(served, 1)
    served.set_rule(Momentum(), ["v", "table"])
    assert waiting.result(LIMIT_S).is_used
    assert worker("b").push(1.0).result(LIMIT_S).is_used
    with pytest.raises(ServerError, match="updates are asynchronous"):
        served.expect(1)


def test_synchronous_push_that_is_sent_twice_counts_once(connections) -> None:
    served = start(connections, UpdateMode(num_needed=2))
    name, array = ["v/part_0"], [np.ones(2, np.float32)]
    fields = {"number": 1, "version": 0, "whole": name, "rows": [], "pull": name}
    push = {
        worker: Message("push", {"client": worker, "worker": worker, **fields}, array)
        for worker in "ab"
    }
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(connections.ask, 0, push[worker]) for worker in "aab"]
        answers = [future.result(LIMIT_S) for future in futures]
    answers.append(connections.ask(0, push["a"]))
    for answer in answers:
        assert (answer.fields["version"], answer.fields["is_used"]) == (1, True)
        np.testing.assert_allclose(answer.arrays[0], -0.2, rtol=1e-6)
    assert num_discarded(served) == 0


def test_synchronous_update_of_a_keyed_table_is_one_sighting(connections) -> None:
    served = ServerClient(connections)
    options = {"admission": {"kind": "AfterSightings", "sightings": 2}}
    served.create(layout_of_keys("t", (2,), "float32", [0], options), None)
    served.set_rule(Momentum(), ["t"], UpdateMode(num_needed=1))
    fields = {"client": "c", "worker": "c", "whole": [], "rows": ["t"], "optimizers": {}}
    arrays = np.array([4]), np.ones((1, 2), np.float32)
    for number, (version, is_used) in enumerate([(0, True), (0, False), (1, True)], 1):
        push = Message("push", {**fields, "number": number, "version": version}, arrays)
        assert connections.ask(0, push).fields["is_used"] == is_used
        (table,) = served.describe()[0]["tables"].values()
        assert table["refused_updates"] == 1  # a discarded push is no sighting
    np.testing.assert_allclose(served.pull_rows("t", np.array([4])), [[-0.1, -0.1]], rtol=1e-6)
    with pytest.raises(ServerError, match="unexpected keyword argument 'storage'"):
        served.create(layout_of_keys("u", (2,), "float32", [0], {"storage": "int8"}), None)


def test_sums_come_before_the_update_and_late_workers_get_their_own(connections, worker) -> None:
    served = start(connections, UpdateMode(num_needed=2))
    one, two, late = (worker(name) for name in ("a", "b", "c"))

    def ask(asking: Worker, value: float, place: int = 0) -> Future[np.ndarray]:
        asked = asking.served.sum_over_workers
        return asking.thread.submit(asked, "v", np.float32([value, 1]), place)

    first = ask(one, 1.0)
    until(lambda: served.describe()[0]["waiting"] == ["a"])
    second = ask(two, 2.0)
    for total in (first, second, ask(one, 1.0)):  # the last one as a worker that was restarted
        np.testing.assert_array_equal(total.result(LIMIT_S), [3, 2])
    assert all(future.result(LIMIT_S).is_used for future in [one.push(1.0), two.push(1.0)])
    np.testing.assert_array_equal(ask(late, 7.0).result(LIMIT_S), [7, 1])
    waiting = ask(one, 4.0)
    until(lambda: len(served.describe()[0]["waiting"]) == 1)
    served.flush()
    np.testing.assert_array_equal(waiting.result(LIMIT_S), [4, 1])
    waiting = ask(one, 6.0, place=1)
    until(lambda: len(served.describe()[0]["waiting"]) == 1)
    served.expect(1)  # the other was lost
    np.testing.assert_array_equal(waiting.result(LIMIT_S), [6, 1])
    served.set_rule(Momentum(), ["v"], UpdateMode())  # each worker alone
    np.testing.assert_array_equal(ask(one, 5.0).result(LIMIT_S), [5, 1])


# Updates of several workers, without servers.


def make(num_needed: int) -> tuple[ServerVariables, Pushes]:
    store = make_store(v=np.zeros(3, np.float32), table=np.zeros((10, 2), np.float32))
    store.set_rule(Momentum(), ["v", "table"])
    pushes = Pushes(store, Lifetime(1))
    pushes.set_mode(UpdateMode(num_needed))
    return store, pushes


def of(client: str, version: int, answers: list, value: float = 1.0, rows=()) -> Contribution:
    ids = np.array(rows, np.int64)
    return Contribution(
        client,
        version,
        {"v": np.full(3, value, np.float32)},
        {"table": (ids, np.ones((len(ids), 2), np.float32))},
        lambda version, *, is_used: answers.append((client, version, is_used)),
        lambda error: answers.append((client, error)),
    )


def test_sum_does_not_depend_on_who_comes_first() -> None:
    values = {"a": 1e8, "b": 1.0, "c": -1e8}
    results = set()
    for order in itertools.permutations(values):
        store, updates = make(3)
        for client in order:
            updates.contribute(of(client, 0, [], values[client]))
        results.add(store.pull(["v"])[0].tobytes())
    assert len(results) == 1


def test_update_that_cannot_be_made_is_reported_to_all_and_the_next_one_is() -> None:
    store, updates = make(2)
    answers: list = []
    updates.contribute(of("a", 0, answers, rows=[10]))
    with pytest.raises(IndexError, match="of 'table' were requested"):
        updates.contribute(of("b", 0, answers))
    assert [(worker, type(error)) for worker, error in answers] == [
        ("a", IndexError),
        ("b", IndexError),
    ]
    updates.contribute(of("a", 0, answers))
    updates.contribute(of("b", 0, answers))
    assert store.version == 1


def test_counters_are_set_with_the_update_to_the_largest_of_all() -> None:
    store, updates = make(2)
    store.set_rule(Momentum("other"), ["v"], "other")
    answers: list = []
    for client, count in (("a", 7.0), ("b", 5.0)):
        assert store.scalars["other.count"] == 0
        updates.contribute(
            dataclasses.replace(of(client, 0, answers), scalars={"other.count": count})
        )
    assert store.scalars["other.count"] == 7


def test_assigned_values_are_updated_once_as_their_mean() -> None:
    store, updates = make(2)
    for client, value in (("a", 1.0), ("b", 3.0)):
        own = {"v": (np.full(3, value, np.float32), 0), "table": (np.ones((10, 2), np.float32), 1)}
        updates.contribute(dataclasses.replace(of(client, 0, []), assigned=own))
    v, table = store.pull(["v", "table"])
    np.testing.assert_allclose(v, 2.0 - 0.2, rtol=1e-6)
    np.testing.assert_allclose(table, 1.0)


# Initial values, and rows that are not there.


@pytest.mark.parametrize("piece_bytes", [1, 50, 2**24])
def test_initial_value_is_made_in_pieces(monkeypatch, piece_bytes) -> None:
    monkeypatch.setattr(shards, "_PIECE_BYTES", piece_bytes)
    asked = []

    def rows(first: int, count: int) -> np.ndarray:
        asked.append((first, count))
        return np.arange(2 * first, 2 * (first + count)).reshape(count, 2)

    value = made_in_pieces(ShardSpec("t", (10, 2), "float32", first_row=5), rows)
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, np.arange(10, 30).reshape(10, 2))
    assert all(count * 8 <= max(piece_bytes, 8) for _, count in asked)
    assert sum(count for _, count in asked) == 10
    with pytest.raises(ValueError, match=r"initial rows of 't' have the shape \(10, 1\)"):
        made_in_pieces(ShardSpec("t", (10, 2), "float32"), lambda first, count: np.zeros((10, 1)))


# Rows by their ids.


@pytest.mark.parametrize("highest", [5, 10**4, 2**62, -1])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("count", [0, 1, 40, 3_000])
def test_rows_of_one_id_are_added_in_their_order(highest, dtype, count) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(*((-9, 9) if highest < 0 else (0, highest)), count).astype(dtype)
    rows = rng.normal(size=(count, 2)).astype(np.float32)
    got_ids, sums = combine_rows(ids, rows)
    assert got_ids.dtype == ids.dtype
    wanted_ids, places = np.unique(ids, return_inverse=True)
    order = np.argsort(got_ids)
    np.testing.assert_array_equal(got_ids[order], wanted_ids)
    wanted = np.zeros((len(wanted_ids), 2), np.float32)
    np.add.at(wanted, places, rows)
    np.testing.assert_array_equal(sums[order], wanted)


@pytest.mark.parametrize("shape", [(3, 2), (0, 2)])
def test_row_that_is_not_there_is_refused(shape) -> None:
    shard = Shard(ShardSpec("a", shape, "float32", has_rows=True), np.zeros(shape, np.float32))
    with pytest.raises(IndexError, match="Rows 3 to 3 of 'a' were requested"):
        shard.require(np.array([3]))
    shard.require(np.array([], np.int32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "complex64"])
def test_sums_have_the_type_of_the_rows_and_are_rounded_once(dtype) -> None:
    rows = np.arange(24).reshape(4, 3, 2).astype(dtype)
    sums = sum_rows(np.array([2, 0, 2, 2]), 3, rows)
    assert sums.dtype == rows.dtype
    wanted = [rows[1], np.zeros((3, 2)), rows[0] + rows[2] + rows[3]]
    np.testing.assert_array_equal(sums, np.array(wanted, dtype))
    if dtype in ("float16", "bfloat16"):  # in which each 1 is lost if it is added to 4096
        rows = np.array([4096] + [1] * 4096, dtype)[:, None]
        assert sum_rows(np.zeros(4097, np.intp), 1, rows).tolist() == [[8192]]
    rows = np.array([[np.inf], [1], [np.nan], [2]], np.float32)
    sums = sum_rows(np.array([1, 0, 2, 0]), 3, rows)
    np.testing.assert_array_equal(sums, [[3], [np.inf], [np.nan]])


@pytest.mark.parametrize("shape", [(1,), (5, 7), (3, 2, 2)])
def test_memory_is_aligned_for_jax(shape) -> None:
    for dtype in ("float32", "int8", "float64"):
        array = aligned_empty(shape, np.dtype(dtype))
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.ctypes.data % 64 == 0
        array[...] = 1


# How updates are to be made.


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((-1, None), "received num_needed=-1"),
        ((0, -1), "received max_staleness=-1"),
        ((2, 0), "limits the staleness of synchronous updates"),
    ],
)
def test_modes_that_cannot_be_are_refused(numbers, words) -> None:
    with pytest.raises(ValueError, match=words):
        UpdateMode(*numbers)


# Variables of one server.


def make_store(**arrays: np.ndarray) -> ServerVariables:
    """A store with these variables; those whose name begins with `table` are updated by rows."""
    store = ServerVariables()
    for name, value in arrays.items():
        spec = ShardSpec(name, value.shape, value.dtype.name, has_rows=name.startswith("table"))
        assert store.create(spec, lambda value=value: value)
    return store


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    "other",
    [
        ShardSpec("v", (4,), "float32"),
        ShardSpec("v", (3,), "int32"),
        ShardSpec("v", (3,), "float32", first_row=1),
        ShardSpec("v", (3,), "float32", has_rows=True),
    ],
)
def test_other_variables_and_unknown_names_are_refused(other) -> None:
    store = make_store(v=floats(3))
    with pytest.raises(ValueError, match="Variable 'v' was created as ShardSpec"):
        store.create(other, lambda: np.zeros(other.shape))
    with pytest.raises(ValueError, match=r"The initial value of 'w' has shape \(2,\)"):
        store.create(ShardSpec("w", (3,), "float32"), lambda: np.zeros(2))
    store.set_rule(Momentum(), ["v"])
    for name in ("w", "v:x", "w:v"):
        with pytest.raises(KeyError, match=f"no variable '{name}' on this server"):
            store.pull([name])


@pytest.mark.parametrize("name", ["v", "table"])
def test_whole_variables_are_read_and_assigned(name) -> None:
    store = make_store(**{name: floats(4, 2)})
    (before,) = store.pull([name])
    store.assign(name, np.ones((4, 2)), sign=1)
    store.assign(name, np.full((4, 2), 3.0), sign=-1)
    np.testing.assert_array_equal(store.pull([name])[0], floats(4, 2) - 2)
    store.assign(name, np.zeros((4, 2)))
    np.testing.assert_array_equal(store.pull([name])[0], 0)
    np.testing.assert_array_equal(before, floats(4, 2))  # what was read stays as it was
    assert store.pull([name])[0].dtype == np.float32
    with pytest.raises(ValueError, match=r"was assigned a value of shape \(2,\)"):
        store.assign(name, np.zeros(2))


class InJax(Momentum):
    """Its values are arrays of JAX, as those of Keras's optimizers are."""

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        made = super().apply(state, grads)
        return dataclasses.replace(
            made, values={name: jnp.asarray(value) for name, value in made.values.items()}
        )


def test_rows_are_read_after_an_update_by_jax() -> None:
    store = make_store(v=floats(4, 2))
    store.set_rule(InJax(), ["v"])
    store.update({"v": np.ones((4, 2), np.float32)}, {})
    rows = store.pull_rows("v", np.array([3, 0]))
    assert isinstance(rows, np.ndarray)
    np.testing.assert_allclose(rows, floats(4, 2)[[3, 0]] - 0.1, rtol=1e-6)


def test_other_optimizer_is_refused_and_the_same_keeps_its_slots() -> None:
    store = make_store(v=floats(3))
    store.set_rule(Momentum(), ["v"])
    store.update({"v": np.ones(3, np.float32)}, {})
    store.set_rule(Momentum(), ["v"])
    np.testing.assert_array_equal(store.pull(["v:v"])[0], 1)
    assert store.scalars == {"count": 1}
    with pytest.raises(ValueError, match=r"with {'name': 'other'}: the servers already have"):
        store.set_rule(Momentum("other"), ["v"])
    assert store.optimizers == {"": {"name": "momentum"}}
    store.set_rule(InJax(), ["v"])  # described alike: the newest one updates
    store.update({"v": np.ones(3, np.float32)}, {})
    assert not isinstance(store._shards["v"].value, np.ndarray)


def test_optimizers_have_their_own_variables_slots_and_scalars() -> None:
    store = make_store(v=floats(3), w=floats(3), table=floats(4, 2))
    store.set_rule(Momentum(), ["v", "table"], "first")
    store.set_rule(Momentum("other"), ["w", "v"], "second")
    one, row = np.ones(3, np.float32), (np.array([1]), np.ones((1, 2), np.float32))
    # An update may be of several, and counts once.
    assert (
        store.update(
            {"v": one, "w": one}, {"table": row}, {"v": "first", "w": "second", "table": "first"}
        )
        == 1
    )
    assert store.update({"v": one}, {}, {"v": "second"}) == 2
    assert store.scalars == {"first.count": 1, "second.count": 2}
    v, w, table, *slots = store.pull(["v", "w", "table", "v:first.v", "v:second.v", "w:second.v"])
    np.testing.assert_allclose(v, floats(3) - 0.1 - 0.1, rtol=1e-6)
    np.testing.assert_allclose(w, floats(3) - 0.1, rtol=1e-6)
    np.testing.assert_allclose(
        table, floats(4, 2) - [[0, 0], [0.1, 0.1], [0, 0], [0, 0]], rtol=1e-6
    )
    np.testing.assert_array_equal(slots, np.ones((3, 3)))
    store.set_scalars({"second.count": 7.0})
    assert store.scalars == {"first.count": 1, "second.count": 7}
    assert store.scalars["second.count"].dtype == np.int64
    for name in ("count", "third.count", "first.other"):
        with pytest.raises(KeyError, match=f"no scalar '{name}' on this server"):
            store.set_scalars({name: 7})
    with pytest.raises(RuntimeError, match=r"gradients of \['v'\] came before"):
        store.update({"v": one}, {})


def test_readers_see_whole_updates_only() -> None:
    """Two variables that are always equal, while one thread updates and others read."""
    store = make_store(a=np.zeros(1000, np.float32), b=np.zeros(1000, np.float32))
    store.set_rule(Momentum(), ["a", "b"])
    is_over, torn = threading.Event(), []

    def read() -> None:
        while not is_over.is_set():
            a, b = store.pull(["a", "b"])
            if not np.array_equal(a, b):
                torn.append((a, b))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    gradient = np.ones(1000, np.float32)
    for _ in range(200):
        store.update({"a": gradient, "b": gradient}, {})
    is_over.set()
    for thread in threads:
        thread.join()
    assert torn == []
    assert store.version == 200
