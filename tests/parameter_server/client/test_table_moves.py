"""Keyed tables that move to other servers, against a table that was never moved."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from stratagem.parameter_server.client import table_moves
from tests.parameter_server.table_clusters import TableCluster, table_cluster

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


@pytest.mark.parametrize("options", [{}, ADMITTING])
def test_state_is_that_of_a_table_that_was_never_moved(options) -> None:
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
