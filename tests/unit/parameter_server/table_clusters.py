"""Servers of this process with a keyed table, and training that can be repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import layout_of_keys
from stratagem.parameter_server.client.table_client import TableClient
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.tables.keyed_shard import KeyedShard
from tests.unit.parameter_server.server.update_rules import Momentum

OPTIONS: dict[str, Any] = {"initializer": {"kind": "uniform", "a": -1, "b": 1, "seed": 3}}


class TableCluster:
    """Servers, and the client of a table of rows of two numbers."""

    def __init__(
        self, keys: ClusterKeys, servers: list[ParameterServer], connections: Connections
    ) -> None:
        self.keys, self.servers, self.connections = keys, servers, connections
        self.client = ServerClient(connections)
        self.tables = TableClient(self.client)

    def create(self, name: str = "t", dtype: str = "float32", **options: Any) -> None:
        servers = range(len(self.servers))
        layout = layout_of_keys(name, (2,), dtype, servers, {**OPTIONS, **options})
        self.client.create(layout, None)
        self.client.set_rule(Momentum(), [name])

    def train(self, steps: range, name: str = "t", num_keys: int = 300) -> None:
        """Pushes the gradients of some steps, which depend on the step alone."""
        for step in steps:
            rng = np.random.default_rng(step)
            keys = np.unique(rng.zipf(1.2, 40) % num_keys) * 2**40 - 5
            rows = self.client.pull_rows(name, keys)
            gradients = rows + rng.normal(size=rows.shape).astype(np.float32)
            self.client.push({}, {name: (keys, gradients)})

    def shards(self, name: str = "t") -> list[KeyedShard]:
        layout = self.tables.layouts[name]
        return [
            self.servers[server].store.keyed_shards[layout.name_of(part)]
            for part, server in enumerate(layout.servers)
        ]

    def state(self, name: str = "t") -> dict[int, tuple[float, ...]]:
        """Row, slot, count and age of each key."""
        state: dict[int, tuple[float, ...]] = {}
        servers = [self.servers[server] for server in self.tables.layouts[name].servers]
        for server, shard in zip(servers, self.shards(name), strict=True):
            rows = shard.keyed.rows
            part = shard.copied_slots(rows.used)
            for place, slot in enumerate(part.rows.tolist()):
                age = server.store.version + shard.keyed.version_offset - int(rows.seen[slot])
                numbers = [*part.value[place], *part.slots["v"][place], rows.counts[slot], age]
                state[int(rows.index.keys[slot])] = tuple(map(float, numbers))
        return state

    def counters(self, name: str = "t") -> dict[str, int]:
        counters = [shard.keyed.counters for shard in self.shards(name)]
        return {key: sum(one[key] for one in counters) for key in counters[0]}


@contextlib.contextmanager
def table_cluster(
    num_servers: int,
    *,
    with_table: bool = True,
    name: str = "t",
    journal: Path | None = None,
    dtype: str = "float32",
    **options: Any,
) -> Iterator[Any]:
    """Starts servers in this process; a journal is for a single one."""
    keys = ClusterKeys.make()
    with contextlib.ExitStack() as stack:
        servers = [
            ParameterServer(
                keys,
                journal=journal,
                journal_interval_s=1e6,
            )
            for _ in range(num_servers)
        ]
        stack.callback(lambda: [server.close() for server in servers])
        addresses = [server.address for server in servers]
        connections = stack.enter_context(Connections(keys, addresses))
        cluster = TableCluster(keys, servers, connections)
        if with_table:
            cluster.create(name, dtype=dtype, **options)
        yield cluster
