"""A keyed table under updates, evictions, saves and kills in any order, beside a dictionary."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import tempfile
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
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from tests.unit.parameter_server.server.update_rules import Momentum
from tests.unit.parameter_server.table_clusters import TableCluster

UNIVERSE = np.arange(12) * 2**40 - 5
PLACES = st.lists(st.integers(0, len(UNIVERSE) - 1), min_size=1, unique=True).map(sorted)


@dataclasses.dataclass
class Row:
    """What a row is, by arithmetic of one row."""

    value: np.ndarray
    velocity: np.ndarray
    count: int = 0
    seen: int = 0  # the update that changed it last


class Table(RuleBasedStateMachine):
    """One server with a journal; `rows` is what it should have, by place in the universe."""

    on_disk = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.keys = ClusterKeys.make()
        self.num_starts = 0
        self.rows: dict[int, Row] = {}
        self.num_updates = 0
        self.saved: dict[int, tuple[dict[int, Row], int]] = {}
        self.last_save: int | None = None
        self.versions = TableVersions(self.folder / "saved")

    @initialize()
    def begin(self) -> None:
        self.start(self.folder / "journal-0")
        more: dict[str, Any] = {}
        if self.on_disk:  # three rows in memory
            row_bytes = 2 * 2 * 4
            more = {"tiers": {"memory_bytes": 3 * row_bytes, "folder": str(self.folder / "disk")}}
        self.cluster.create(**more)
        self.initial = self.cluster.client.pull_rows("t", UNIVERSE)
        self.flush()

    def start(self, journal: Path) -> None:
        self.journal = journal
        self.server = ParameterServer(self.keys, journal=journal, journal_interval_s=1e6)
        self.connections = Connections(self.keys, [self.server.address])
        self.cluster = TableCluster(self.keys, [self.server], self.connections)

    def stop(self) -> None:
        self.connections.close()
        self.server.close()

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
                keyed.rows.remove(slots)
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

    @rule()
    def flush(self) -> None:
        self.cluster.client.journal()
        self.durable = copy.deepcopy(self.rows), self.num_updates

    @precondition(lambda self: not self.on_disk)  # its folder cannot be copied beside it
    @rule()
    def kill(self) -> None:
        """A copy of the journal is what a killed server leaves."""
        self.num_starts += 1
        left = self.folder / f"journal-{self.num_starts}"
        shutil.copy(self.journal, left)
        self.rows, self.num_updates = copy.deepcopy(self.durable)
        self.start_again(left)

    @rule()
    def end_in_order(self) -> None:
        self.durable = copy.deepcopy(self.rows), self.num_updates
        self.start_again(self.journal)

    def start_again(self, journal: Path) -> None:
        layout = self.cluster.tables.layouts["t"]
        self.stop()
        self.start(journal)
        self.cluster.client.know(layout)
        self.cluster.client.set_rule(Momentum(), ["t"])

    @invariant()
    def pulls_are_those_of_the_dictionary(self) -> None:
        pulled = self.cluster.client.pull_rows("t", UNIVERSE)
        rows = enumerate(self.initial)
        wanted = [self.rows[place].value if place in self.rows else one for place, one in rows]
        np.testing.assert_array_equal(pulled, wanted)
        (found,) = self.cluster.client.describe()[0]["tables"].values()
        assert found["rows"] == len(self.rows)

    def teardown(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)


class TableOnDisk(Table):
    on_disk = True


@pytest.mark.parametrize("machine", [Table, TableOnDisk])
@pytest.mark.parametrize("examples", [5, pytest.param(150, marks=pytest.mark.slow)])
def test_table_is_a_dictionary(machine: type[Table], examples: int) -> None:
    chosen = settings(max_examples=examples, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=chosen)
