"""Servers with a journal under changes, saves and kills in any order, beside dictionaries."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.changes import kind_of
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from tests.unit.parameter_server.server.update_rules import Momentum
from tests.unit.parameter_server.table_clusters import TableCluster


class Journaled(RuleBasedStateMachine):
    """A server whose journal is copied when it is killed; `kept` names what it then has again."""

    kept: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.keys = ClusterKeys.make()
        self.num_starts = 0
        self.start(self.folder / "journal-0")

    def start(self, journal: Path) -> None:
        self.journal = journal
        self.server = ParameterServer(self.keys, journal=journal, journal_interval_s=1e6)
        self.connections = Connections(self.keys, [self.server.address])

    def stop(self) -> None:
        self.connections.close()
        self.server.close()

    def started_again(self) -> None:
        """A new client sends what clients send."""

    @rule()
    def flush(self) -> None:
        ServerClient(self.connections).journal()
        self.durable = copy.deepcopy([getattr(self, name) for name in self.kept])

    @rule()
    def kill(self) -> None:
        """A copy of the journal is what a killed server leaves."""
        self.num_starts += 1
        left = self.folder / f"journal-{self.num_starts}"
        shutil.copy(self.journal, left)
        for name, value in zip(self.kept, copy.deepcopy(self.durable), strict=True):
            setattr(self, name, value)
        self.stop()
        self.start(left)
        self.started_again()

    @rule()
    def end_in_order(self) -> None:
        self.durable = copy.deepcopy([getattr(self, name) for name in self.kept])
        self.stop()
        self.start(self.journal)
        self.started_again()

    def teardown(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)


V = ShardLayout("v", (3,), "float32", (0,), (3,))
TABLE = ShardLayout("table", (4, 2), "float32", (0,), (4,), has_rows=True)
ROWS = st.lists(st.integers(0, 3), unique=True).map(sorted)


class Variables(Journaled):
    """Changes of two clients, which send their last one again and run functions of the other.

    `made` has the number of each client's last change, `places` that of each function's last one.
    """

    kept = ("values", "made", "places", "reruns", "applied", "repeated")

    @initialize()
    def begin(self) -> None:
        self.values: dict[str, np.ndarray] = {}
        client = ServerClient(self.connections)
        for layout in (V, TABLE):
            client.create(layout, np.zeros(layout.shape, np.float32))
            for name in (layout.name, f"{layout.name}:v"):
                self.values[name] = np.zeros(layout.shape, np.float32)
        self.started_again()
        self.made: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.reruns: set[str] = set()
        self.applied: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()
        # What clients know.
        self.numbers: Counter[str] = Counter()
        self.last: dict[str, tuple[Message, dict[str, Any]]] = {}
        self.runs: dict[tuple[str, str], tuple[bool, int]] = {}
        self.flush()

    def started_again(self) -> None:
        self.client = ServerClient(self.connections)
        for layout in (V, TABLE):
            self.client.know(layout)
        self.client.set_rule(Momentum(), ["v", "table"])

    @rule(
        client=st.sampled_from("ab"),
        function=st.sampled_from(["", "f", "g"]),
        kind=st.sampled_from(["assign", "scatter", "push", "push"]),
        sign=st.integers(-1, 1),
        rows=ROWS,
        seed=st.integers(0, 9),
    )
    def change(
        self, client: str, function: str, kind: str, sign: int, rows: list[int], seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        v = rng.normal(size=3).astype(np.float32)
        own = np.array(rows, np.int64), rng.normal(size=(len(rows), 2)).astype(np.float32)
        fields, arrays = {
            "assign": ({"names": ["v"], "sign": sign}, [v]),
            "scatter": ({"names": ["table"], "sign": sign}, [*own]),
            "push": ({"version": 0, "whole": ["v"], "rows": ["table"]}, [v, *own]),
        }[kind]
        self.numbers[client] += 1
        fields |= {"client": client, "number": self.numbers[client]}
        if function:  # that the other one began is begun again
            is_begun = any(name == function for _, name in self.runs)
            is_rerun, place = self.runs.get((client, function), (is_begun, 0))
            self.runs[client, function] = is_rerun, place + 1
            fields |= {"function": function, "place": place + 1, "is_rerun": is_rerun}
            fields |= {"order": 0, "first_open": 0}
        self.last[client] = Message(kind, fields, arrays), {"v": v, "rows": own}
        self.send(client)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def begin_again(self, data: st.DataObject) -> None:
        """A worker was given up, went on, and gets its function again."""
        self.runs[data.draw(st.sampled_from(sorted(self.runs)))] = True, 0

    @precondition(lambda self: self.last)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        self.send(data.draw(st.sampled_from(sorted(self.last))))

    def send(self, client: str) -> None:
        message, arrays = self.last[client]
        answer, fields = self.connections.ask(0, message).fields, message.fields
        if fields["number"] <= self.made[client]:
            return
        self.made[client] = fields["number"]
        kind = str(kind_of(message))
        if function := fields.get("function"):
            self.reruns |= {function} if fields["is_rerun"] else set()
            is_made = function in self.reruns and fields["place"] <= self.places[function]
            assert bool(answer.get("is_repeated")) == is_made
            if is_made:
                self.repeated[kind] += 1
                return
            self.places[function] = max(fields["place"], self.places[function])
        self.applied[kind] += 1
        numbers, rows = arrays["rows"]
        if message.kind == "push":
            self.update("v", slice(None), arrays["v"])
            self.update("table", numbers, rows)
        else:
            name, part, value = ("v", slice(None), arrays["v"])
            if message.kind == "scatter":
                name, part, value = "table", numbers, rows
            sign = fields["sign"]
            self.values[name][part] = self.values[name][part] * abs(sign) + value * (sign or 1)

    def update(self, name: str, part: Any, gradient: np.ndarray) -> None:
        value, slot = self.values[name], self.values[f"{name}:v"]
        slot[part] = np.float32(0.5) * slot[part] + gradient
        value[part] -= np.float32(0.1) * slot[part]

    @invariant()
    def server_has_the_values(self) -> None:
        for name, value in self.client.pull([*self.values]).items():
            np.testing.assert_allclose(value, self.values[name], rtol=1e-5, atol=1e-6, err_msg=name)
        assert self.client.scalars() == {"count": self.applied["push"]}
        state = self.client.describe()[0]
        assert state["version"] == self.applied["push"]
        assert state["updates"]["applied"] == self.applied
        assert state["updates"]["repeated"] == self.repeated


UNIVERSE = np.arange(12) * 2**40 - 5
PLACES = st.lists(st.integers(0, len(UNIVERSE) - 1), min_size=1, unique=True).map(sorted)


@dataclasses.dataclass
class Row:
    """What a row is, by arithmetic of one row."""

    value: np.ndarray
    velocity: np.ndarray
    count: int = 0
    seen: int = 0  # the update that changed it last


class Table(Journaled):
    """A keyed table; `rows` is what it should have, by place in the universe."""

    kept = ("rows", "num_updates")
    on_disk = False

    @initialize()
    def begin(self) -> None:
        self.rows: dict[int, Row] = {}
        self.num_updates = 0
        self.saved: dict[int, tuple[dict[int, Row], int]] = {}
        self.last_save: int | None = None
        self.versions = TableVersions(self.folder / "saved")
        more: dict[str, Any] = {}
        if self.on_disk:  # three rows in memory
            row_bytes = 2 * 2 * 4
            more = {"tiers": {"memory_bytes": 3 * row_bytes, "folder": str(self.folder / "disk")}}
        self.cluster = TableCluster(self.keys, [self.server], self.connections)
        self.cluster.create(**more)
        self.layout = self.cluster.tables.layouts["t"]
        self.initial = self.cluster.client.pull_rows("t", UNIVERSE)
        self.flush()

    def started_again(self) -> None:
        self.cluster = TableCluster(self.keys, [self.server], self.connections)
        self.cluster.client.know(self.layout)
        self.cluster.client.set_rule(Momentum(), ["t"])

    @rule(places=PLACES, seed=st.integers(0, 9))
    def push(self, places: list[int], seed: int) -> None:
        gradients = np.random.default_rng(seed).normal(size=(len(places), 2)).astype(np.float32)
        self.cluster.client.push({}, {"t": (UNIVERSE[places], gradients)})
        self.num_updates += 1
        for place, gradient in zip(places, gradients, strict=True):
            new = Row(self.initial[place], np.zeros(2, np.float32))
            row = self.rows.setdefault(place, new)
            row.velocity = np.float32(0.5) * row.velocity + gradient
            row.value = row.value - np.float32(0.1) * row.velocity
            row.count, row.seen = row.count + 1, self.num_updates

    @rule(places=PLACES)
    def evict(self, places: list[int]) -> None:
        """As a policy does, which chooses by counts and ages."""
        here = [place for place in places if place in self.rows]
        store = self.server.store
        with store.changing():
            keyed, lock = store.keyed_shards["t"].keyed, store.keyed_shards["t"].lock
            slots = keyed.rows.find(UNIVERSE[here])
            ages = store.version + keyed.version_offset - keyed.rows.seen[slots].astype(np.int64)
            rows = [self.rows.pop(place) for place in here]
            assert keyed.rows.counts[slots].tolist() == [row.count for row in rows]
            assert ages.tolist() == [self.num_updates - row.seen for row in rows]
            with lock:
                keyed.rows.remove(slots, store.version + 1 + keyed.version_offset)
            store.num_changes += 1

    @rule(is_change=st.booleans())
    def save(self, is_change: bool) -> None:
        since = self.last_save if is_change else None
        self.last_save = self.cluster.tables.save(self.versions, since=since)
        self.saved[self.last_save] = copy.deepcopy(self.rows), self.num_updates

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.saved)))
        self.cluster.tables.restore(self.versions, number)
        rows, then = copy.deepcopy(self.saved[number])
        for row in rows.values():  # ages go on
            row.seen += self.num_updates - then
        self.rows = rows
        self.flush()

    @precondition(lambda self: not self.on_disk)  # its folder cannot be copied beside it
    @rule()
    def kill(self) -> None:
        super().kill()

    @invariant()
    def pulls_are_those_of_the_dictionary(self) -> None:
        pulled = self.cluster.client.pull_rows("t", UNIVERSE)
        rows = enumerate(self.initial)
        wanted = [self.rows[place].value if place in self.rows else one for place, one in rows]
        np.testing.assert_array_equal(pulled, wanted)
        (found,) = self.cluster.client.describe()[0]["tables"].values()
        assert found["rows"] == len(self.rows)


class TableOnDisk(Table):
    on_disk = True


@pytest.mark.parametrize("machine", [Variables, Table, TableOnDisk])
@pytest.mark.parametrize("examples", [5, pytest.param(150, marks=pytest.mark.slow)])
def test_server_has_what_dictionaries_have(machine: type[Journaled], examples: int) -> None:
    chosen = settings(max_examples=examples, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=chosen)
