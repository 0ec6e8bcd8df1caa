"""Keyed tables that move to other servers, against a table that was never moved."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import UnavailableError
from stratagem.parameter_server.client import table_moves
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardPlacer
from stratagem.parameter_server.client.variable_client import VariableClient
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.server.tables.policies import LeastFrequent
from stratagem.parameter_server.server.tables.table_versions import TableVersions
from stratagem.parameter_server.server.updates import ASYNCHRONOUS, UpdateMode
from tests.unit.observe.run_events.test_wait_clock import ticking
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.shared_with_workers import forget, go_on, started, wait_to_go_on
from tests.unit.parameter_server.table_clusters import OPTIONS, TableCluster, table_cluster

ADMITTING = {"admission": {"kind": "AfterSightings", "sightings": 2}}
AGING = {"eviction": {"kind": "NotSeenFor", "steps": 20}}


def candidates(cluster: TableCluster) -> dict[int, int]:
    found: dict[int, int] = {}
    for shard in cluster.shards():
        one = shard.keyed.candidates
        found |= zip(one.index.keys[one.used].tolist(), one.counts[one.used].tolist(), strict=True)
    return found


def names(cluster: TableCluster) -> list[list[str]]:
    return [server.store.names for server in cluster.servers]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(ADMITTING, marks=pytest.mark.slow),
        pytest.param({"storage_dtype": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_state_is_that_of_a_table_that_was_never_moved(options, monkeypatch) -> None:
    monkeypatch.setattr(table_moves, "time", ticking())
    with table_cluster(3, **options) as cluster, table_cluster(1, **options) as plain:
        for place, num_servers in enumerate((2, 3, 1, 3)):
            steps = range(8 * place, 8 * place + 8)
            cluster.train(steps)
            plain.train(steps)
            before = cluster.state()
            moved = cluster.reshard(num_servers)
            assert cluster.tables.layouts["t"].servers == tuple(range(num_servers))
            assert cluster.state() == before == plain.state()
            assert candidates(cluster) == candidates(plain)
            assert cluster.counters() == plain.counters()
            assert moved.rows >= len(before)
            assert moved.duration_s > moved.pause_s > 0
            assert all(
                len(one) == (place < num_servers) for place, one in enumerate(names(cluster))
            )
        cluster.train(range(32, 40))
        plain.train(range(32, 40))
        assert cluster.state() == plain.state()
        assert cluster.counters() == plain.counters()
        scalars = [cluster.client.scalars(server)["count"] for server in range(3)]
        assert scalars == [40, 40, 40]


@contextlib.contextmanager
def training_meanwhile(cluster: TableCluster, monkeypatch: Any, pieces: int = 30) -> Any:
    """Moves in small pieces, between which rows are updated, made and evicted."""
    seen: dict[str, Any] = {}
    steps = iter(range(1000, 2000))
    send, end = table_moves._TableMove._send, table_moves._TableMove.end

    def train_and_send(self: Any, *args: Any, **options: Any) -> None:
        send(self, *args, **options)
        if self.num_rounds < 2:
            step = next(steps)
            cluster.train(range(step, step + 1))

    def note_and_end(self: Any) -> None:
        seen["state"], seen["counters"] = cluster.state(), cluster.counters()
        seen["candidates"] = candidates(cluster)
        seen["steps"] = next(steps) - 1000
        end(self)

    with monkeypatch.context() as patch:
        patch.setattr("stratagem.parameter_server.server.table_moves.piece_rows", lambda *_: pieces)
        patch.setattr(table_moves._TableMove, "_send", train_and_send)
        patch.setattr(table_moves._TableMove, "end", note_and_end)
        yield seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        ADMITTING,
        AGING,
        {**ADMITTING, "eviction": {"kind": "LeastRecent"}, "max_rows": 30},
        {"eviction": {"kind": "LeastFrequent"}, "max_rows": 61},
    ],
)
@pytest.mark.parametrize("num_servers", [(2, 3), (3, 1)])
def test_rows_that_change_while_others_are_copied(options, num_servers, monkeypatch) -> None:
    first, second = num_servers
    with table_cluster(3, **options) as cluster:
        cluster.reshard(first)
        cluster.train(range(20))
        with training_meanwhile(cluster, monkeypatch) as seen:
            cluster.reshard(second)
        assert seen["steps"] > 3
        assert cluster.state() == seen["state"]
        assert candidates(cluster) == seen["candidates"]
        assert cluster.counters() == seen["counters"]
        cluster.train(range(20, 30))
        counters, counts = cluster.counters(), [row[4] for row in cluster.state().values()]
        pushed = [
            len(np.unique(np.random.default_rng(step).zipf(1.2, 40) % 300))
            for step in [*range(30), *range(1000, 1000 + seen["steps"])]
        ]
        total = sum(counts) + counters["evicted_updates"] + counters["refused_updates"]
        assert total == sum(pushed)


@pytest.mark.slow
def test_a_full_table_keeps_its_rows_and_its_limit() -> None:
    options = {"eviction": {"kind": "LeastRecent"}, "max_rows": 30}
    with table_cluster(3, **options) as cluster:
        cluster.reshard(1)
        cluster.train(range(40))
        before = cluster.state()
        assert len(before) == 30
        cluster.reshard(3)
        assert cluster.state() == before
        assert max(len(shard.keyed.rows) for shard in cluster.shards()) > 10
        assert [shard.spec.table["max_rows"] for shard in cluster.shards()] == [10, 10, 10]
        cluster.train(range(40, 80))
        assert [len(shard.keyed.rows) for shard in cluster.shards()] == [10, 10, 10]
        cluster.reshard(1)
        cluster.train(range(80, 120))
        assert len(cluster.state()) == 30


def test_ages_of_servers_that_made_different_numbers_of_updates() -> None:
    with table_cluster(2) as cluster:
        cluster.train(range(20))
        # only the second server updates another variable while rows are copied
        cluster.create("u")
        cluster.train(range(20, 25), "u")
        before = cluster.state()
        copy = table_moves._TableMove.copy

        def copy_and_update(self: Any) -> None:
            copy(self)
            if self.num_rounds == 1:
                name = cluster.tables.layouts["u"].name_of(1)
                for _ in range(3):
                    cluster.servers[1].store.update({}, {name: (np.array([5]), np.ones((1, 2)))})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table_moves._TableMove, "copy", copy_and_update)
            cluster.reshard(1)
        after = cluster.state()
        shards = cluster.tables.layouts["u"].shards_of(np.array([*before]))
        for (key, row), shard in zip(before.items(), shards.tolist(), strict=True):
            assert after[key] == (*row[:-1], row[-1] + 3 * shard)


def test_a_scalar_that_an_optimizer_lowers() -> None:
    with table_cluster(2) as cluster:
        cluster.reshard(1)
        cluster.train(range(10))
        cluster.servers[0].store.set_scalars({"count": np.array(-5)})
        cluster.reshard(2)
        assert [cluster.client.scalars(server)["count"] for server in (0, 1)] == [-5, -5]
        cluster.reshard(1)
        assert [cluster.client.scalars(server)["count"] for server in (0, 1)] == [-5, -5]


def fail_at(cluster: TableCluster, patch: Any, method: str, action: Any) -> None:
    """Acts once, before a part of the move."""
    original = getattr(table_moves._TableMove, method)
    actions = [action]

    def act(self: Any, *args: Any, **options: Any) -> Any:
        if self.num_rounds and actions:
            actions.pop()()
        return original(self, *args, **options)

    patch.setattr(table_moves._TableMove, method, act)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["copy", "_send", "end"])
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_server_that_is_killed_in_the_middle(method, killed, tmp_path) -> None:
    with table_cluster(3, journals=tmp_path) as cluster:
        cluster.reshard(2, has_journals=True)
        cluster.train(range(10))
        cluster.client.journal()
        before, layout = cluster.state(), cluster.tables.layouts["t"]
        with pytest.MonkeyPatch.context() as patch:
            fail_at(cluster, patch, method, lambda: cluster.restart(killed, tmp_path))
            with pytest.raises(UnavailableError, match="restarted while keyed tables were moved"):
                cluster.reshard(3, has_journals=True)
        assert cluster.tables.layouts["t"] == layout
        assert cluster.state() == before
        assert [len(one) for one in names(cluster)] == [1, 1, 0]
        cluster.train(range(10, 15))
        before = cluster.state()
        cluster.reshard(3, has_journals=True)
        assert cluster.state() == before


@pytest.mark.slow
def test_servers_that_restart_after_the_move_have_the_moved_state(tmp_path) -> None:
    with table_cluster(3, journals=tmp_path) as cluster, table_cluster(1) as plain:
        cluster.reshard(1, has_journals=True)
        for number, num_servers in enumerate((3, 2)):
            steps = range(10 * number, 10 * number + 10)
            cluster.train(steps)
            plain.train(steps)
            cluster.reshard(num_servers, has_journals=True)
            for server in range(3):
                cluster.restart(server, tmp_path)
            assert cluster.state() == plain.state()
            assert [len(one) for one in names(cluster)] == [1] * num_servers + [0] * (
                3 - num_servers
            )
        cluster.train(range(20, 30))  # its optimizer is sent again, for the new shards
        plain.train(range(20, 30))
        assert cluster.state() == plain.state()


@pytest.mark.slow
def test_a_first_server_that_forgets_the_decision_records_it_again(tmp_path) -> None:
    with table_cluster(2, journals=tmp_path) as cluster:
        cluster.train(range(10))
        before = cluster.state()
        ask, restarts = cluster.client.ask_servers, [0]

        def ask_and_restart(kind: str, requests: Any) -> Any:
            answers = ask(kind, requests)
            if kind == "place_tables" and restarts:
                cluster.restart(restarts.pop(), tmp_path)
            return answers

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster.client, "ask_servers", ask_and_restart)
            cluster.reshard(1, has_journals=True)
        assert not restarts
        assert cluster.client.placed_layouts()["t"]["generation"] == 1
        cluster.restart(0, tmp_path)
        assert cluster.client.placed_layouts()["t"]["generation"] == 1
        assert cluster.state() == before


def test_another_program_finds_the_moved_table(tmp_path) -> None:
    with table_cluster(3, journals=tmp_path) as cluster:
        cluster.train(range(10))
        cluster.reshard(2, has_journals=True)
        before = cluster.state()
        other = VariableClient(ServerClient(cluster.connections), ShardPlacer(3), ASYNCHRONOUS)
        variable: Any = Mock(path="t", shape=(0, 2), dtype="float32")
        other.create_keyed(variable, OPTIONS, skips_zero=False)
        assert other.placement_of(variable) == cluster.tables.layouts["t"]
        rows = other.read_rows(variable, np.array([*before]))
        np.testing.assert_array_equal(rows, [row[:2] for row in before.values()])
        another = VariableClient(ServerClient(cluster.connections), ShardPlacer(3), ASYNCHRONOUS)
        with pytest.raises(ValueError, match="but it already exists"):
            another.create_keyed(variable, {**OPTIONS, "max_rows": 9}, skips_zero=False)


def test_only_leftovers_of_the_moved_tables_are_dropped() -> None:
    with table_cluster(2) as cluster:
        cluster.train(range(10))
        before = cluster.state()
        specs = [shard.spec for shard in cluster.shards()]
        for name in ("t/part_0@1", "t/part_1@7", "tt/part_0@1", "u/part_0"):
            cluster.servers[1].store.create(dataclasses.replace(specs[0], name=name))
        cluster.reshard(1)
        assert names(cluster) == [["t/part_0@1"], ["tt/part_0@1", "u/part_0"]]
        assert cluster.state() == before


def test_saves_after_a_move(tmp_path) -> None:
    versions = TableVersions(tmp_path / "saved")
    with table_cluster(3) as cluster:
        cluster.train(range(10))
        first = cluster.tables.save(versions)
        cluster.reshard(2)
        cluster.train(range(10, 20))
        second = cluster.tables.save(versions, since=first)
        cluster.train(range(20, 25))
        third = cluster.tables.save(versions, since=second)
        parts = versions.manifest(third)["tables"]["t"]["parts"]
        assert len(parts) == 2
        assert all(part["base"] for part in parts)
        state = cluster.state()
        cluster.tables.restore(versions, first)
        assert cluster.state() != state
        cluster.tables.restore(versions, third)
        assert cluster.state() == state
        assert cluster.tables.evict(LeastFrequent(), 3) == len(state) - 6


def test_the_last_rows_wait_for_requests_in_progress() -> None:
    with table_cluster(2) as cluster:
        cluster.train(range(3))
        ended: list[str] = []
        copied = threading.Event()

        def move() -> None:
            cluster.reshard(1)
            ended.append("move")

        with cluster.client.known.in_use():
            thread = threading.Thread(target=move)
            with pytest.MonkeyPatch.context() as patch:
                changing = cluster.client.known.changing

                def noted() -> Any:
                    copied.set()
                    return changing()

                patch.setattr(cluster.client.known, "changing", noted)
                thread.start()
                assert copied.wait(60)
            ended.append("request")
        thread.join()
        assert ended == ["request", "move"]


def test_a_decision_without_an_answer_is_unknown() -> None:
    with table_cluster(2) as cluster:
        cluster.train(range(3))
        ask = cluster.client.ask_servers

        def lose(kind: str, requests: Any) -> Any:
            if kind == "place_tables":
                raise UnavailableError("server 0 is lost")
            return ask(kind, requests)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster.client, "ask_servers", lose)
            with pytest.raises(UnavailableError, match="It is not known if keyed tables"):
                cluster.reshard(1)
        assert len(cluster.tables.layouts["t"].servers) == 2
        assert names(cluster)[0] == ["t/part_0", "t/part_0@1"]  # whichever is valid, it is there


# Blocks of scheduled functions in which each variable is read once.

NUM_ROWS = 9000  # times 8: large enough for rows to be asked for


@pytest.fixture
def one() -> Iterator[ClusterCoordinator]:
    """Of one worker, with tests that share nothing."""
    forget()
    with coordinated() as made:
        yield made


def _counting_requests(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns on a worker, and how often it asked for values."""
    client = sg.get_strategy().placement.remote.variables.client
    asked: list[Any] = []

    def counted(original: Any) -> Any:
        def ask(*args: Any) -> Any:
            asked.append(args)
            return original(*args)

        return ask

    for name in ("pull", "scalars"):
        setattr(client, name, counted(getattr(client, name)))
    try:
        return function(), len(asked)
    finally:
        del client.pull, client.scalars


def test_value_is_read_once_whatever_others_write_meanwhile(one) -> None:
    with one.strategy.scope():
        v = sg.Variable(np.ones(3, "float32"))

    def read() -> list[float]:
        with sg.coordinator.cache_variable_reads():
            values = [float(v.value[0])]
            wait_to_go_on()
            values.append(float(v.value[0]))
            step = sg.get_strategy().run(lambda: v.value[0])
            values.append(float(step))
        values.append(float(v.value[0]))
        return values

    observed = one.schedule(read)
    assert started.acquire(timeout=60.0)
    v.assign(np.full(3, 5.0))
    go_on.set()
    assert observed.fetch() == [1, 1, 1, 5]


def test_servers_are_asked_once_for_each_variable(one) -> None:
    with one.strategy.scope():
        v, w = (sg.Variable(np.full(2, i, "float32")) for i in (1, 2))

    def read() -> tuple[Any, int]:
        def reads() -> list[float]:
            strategy = sg.get_strategy()
            observed = []
            for _ in range(4):
                observed.append(float(v.value[0]))
                observed.append(float(strategy.run(lambda: v.value[0] + w.value[1])))
            return observed

        def cached() -> list[float]:
            with sg.coordinator.cache_variable_reads():
                return reads()

        return _counting_requests(reads), _counting_requests(cached)

    plain, cached = one.schedule(read).fetch()
    assert plain == ([1, 3] * 4, 8)
    assert cached == ([1, 3] * 4, 2)


def test_own_assignments_are_seen_and_reach_the_servers(one) -> None:
    with one.strategy.scope():
        v = sg.Variable(np.ones(2, "float32"))
        w = sg.Variable(np.ones(2, "float32"), trainable=False)

    def change() -> tuple[list[float], int]:
        def changes() -> list[float]:
            with sg.coordinator.cache_variable_reads():
                observed = [float(v.value[0] + w.value[0])]
                v.assign(np.full(2, 4.0))
                observed.append(float(v.value[0]))
                v.assign_add(np.full(2, 2.0))
                observed.append(float(v.value[0]))
                sg.get_strategy().run(lambda: w.assign_sub(jnp.ones(2)))
                observed.append(float(w.value[0]))
                sg.get_strategy().run(lambda: w.assign(v.value * 10))
                observed.append(float(w.value[0]))
                return observed

        return _counting_requests(changes)

    assert one.schedule(change).fetch() == ([2, 4, 6, 0, 60], 2)
    assert np.asarray(v.value).tolist() == [6, 6]
    assert np.asarray(w.value).tolist() == [60, 60]


def test_own_updates_are_seen(one) -> None:
    with one.strategy.scope():
        v = sg.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([v])

    def train() -> list[float]:
        observed: list[float] = []
        slot = optimizer.momentums[0]
        with sg.coordinator.cache_variable_reads():
            for _ in range(3):
                observed += [float(v.value[0]), float(slot.value[0]), int(optimizer.iterations)]
                sg.get_strategy().run(lambda: optimizer.apply([jnp.ones(2)], [v]))
                optimizer.learning_rate = float(optimizer.learning_rate) * 2
        return observed

    # By hand: the momentum is 0.5 m - lr, with rates of 1, 2 and 4.
    assert one.schedule(train).fetch() == [0, 0, 0, -1, -1, 1, -3.5, -2.5, 2]
    assert np.asarray(v.value).tolist() == [-8.75, -8.75]


def test_step_that_came_too_late_is_run_again_with_new_values() -> None:
    forget()
    with coordinated(mode=UpdateMode(0, 0)) as one:
        with one.strategy.scope():
            v = sg.Variable(np.full(2, 8.0, "float32"))
            optimizer = keras.optimizers.SGD(0.5)
            optimizer.build([v])

        def update() -> None:
            sg.get_strategy().run(lambda: optimizer.apply([v.value], [v]))

        def late() -> list[float]:
            with sg.coordinator.cache_variable_reads():
                before = float(v.value[0])
                wait_to_go_on()
                update()
                return [before, float(v.value[0])]

        observed = one.schedule(late)
        assert started.acquire(timeout=60.0)
        name = v.place.name
        one.strategy.placement.remote.variables.client.push(
            {name: np.full(2, 8.0, "float32")}, optimizers={name: "sgd"}
        )
        go_on.set()
        assert observed.fetch() == [8, 2]  # half of 4, which another one had made of 8


def test_tables_are_asked_for_each_time(one) -> None:
    with one.strategy.scope():
        layer = keras.layers.Embedding(NUM_ROWS, 8, embeddings_initializer="ones")
        layer.build((2,))
    (table,) = layer.variables
    assert table.has_rows

    def read() -> list[float]:
        def observed() -> list[float]:
            step = sg.get_strategy().run(lambda: layer(jnp.asarray([7]))[0, 0])
            return [float(np.asarray(table.value)[7, 0]), float(step)]

        with sg.coordinator.cache_variable_reads():
            values = observed()
            wait_to_go_on()
            return values + observed()

    values = one.schedule(read)
    assert started.acquire(timeout=60.0)
    table.assign(np.full((NUM_ROWS, 8), 3.0, "float32"))
    go_on.set()
    assert values.fetch() == [1, 1, 3, 3]


def test_where_it_may_be_used(one) -> None:
    def nested() -> None:
        with (
            sg.coordinator.cache_variable_reads(),
            pytest.raises(ValueError, match="called inside a block of cache_variable_reads"),
            sg.coordinator.cache_variable_reads(),
        ):
            pass

    def in_step() -> None:
        with sg.coordinator.cache_variable_reads():
            pass

    def steps() -> None:
        sg.get_strategy().run(in_step)

    one.schedule(nested).fetch()
    one.schedule(in_step).fetch()  # the one before has ended
    one.schedule(steps)
    with pytest.raises(RuntimeError, match="cache_variable_reads was called in a replica function"):
        one.join()
    with (
        pytest.raises(RuntimeError, match="was called outside of a scheduled function"),
        sg.coordinator.cache_variable_reads(),
    ):
        pass
