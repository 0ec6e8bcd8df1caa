"""One full version in place of several, and versions that are killed while they are written."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from stratagem.errors import DataLossError
from stratagem.group.transport.connection import ServerError
from stratagem.parameter_server.server import shards
from stratagem.parameter_server.server.tables.table_chains import compact
from stratagem.parameter_server.server.tables.table_files import TableFileWriter
from stratagem.parameter_server.server.tables.table_versions import TableVersions
from tests.unit.parameter_server.table_clusters import TableCluster, table_cluster

OPTIONS = {
    "admission": {"kind": "AfterSightings", "sightings": 2},
    "eviction": {"kind": "LeastFrequent"},
    "max_rows": 40,
}


class KilledError(BaseException):
    """What a process that is killed does not do."""


class Disk:
    """Ends after some operations; nothing is written or removed from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 10**9
        self.used = 0
        for owner, name in (
            (os, "fsync"),
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "mkdir"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, operation):
        def run(*args, **kwargs):
            if self.left <= 0:
                raise KilledError
            self.left -= 1
            self.used += 1
            return operation(*args, **kwargs)

        return run


@pytest.fixture
def versions(tmp_path) -> TableVersions:
    return TableVersions(tmp_path / "saved")


def saved_versions(cluster: TableCluster, versions: TableVersions) -> dict[int, object]:
    """Saves four versions, and returns their states."""
    states: dict[int, object] = {}
    number = None
    for begin in range(0, 40, 10):
        cluster.train(range(begin, begin + 10))
        number = cluster.tables.save(versions, since=number)
        states[number] = cluster.state(), cluster.counters()
    return states


def restored(cluster: TableCluster, versions: TableVersions, number: int) -> object:
    cluster.tables.restore(versions, number)
    return cluster.state(), cluster.counters()


@pytest.mark.parametrize("order", [*itertools.permutations([2, 3, 4])])
def test_versions_are_the_same_in_any_order_of_compaction(versions, order) -> None:
    with table_cluster(1, **OPTIONS) as cluster:
        states = saved_versions(cluster, versions)
        versions.publish(1)  # so that no version is removed
        for number in order:
            compact(versions, number)
            manifest = versions.manifest(number)
            assert all(part["base"] is None for part in manifest["tables"]["t"]["parts"])
            assert {one.name for one in versions.path(number).iterdir()} == {
                "manifest.json",
                "t-0.all.rows",
            }
        assert {one: restored(cluster, versions, one) for one in states} == states


def test_versions_that_others_need_stay(versions) -> None:
    with table_cluster(2, **OPTIONS) as cluster:
        states = saved_versions(cluster, versions)
        versions.publish(2)
        compact(versions, 4)  # 2 is published, and continues 1
        assert versions.numbers == [1, 2, 3, 4]
        compact(versions, 2)
        assert versions.numbers == [2, 3, 4]
        versions.publish(4)
        compact(versions, 4)
        assert versions.numbers == [4]
        assert restored(cluster, versions, 4) == states[4]
        with pytest.raises(DataLossError, match="it is missing"):
            cluster.tables.restore(versions, 3)
        cluster.train(range(5))
        number = cluster.tables.save(versions, since=4)
        state = cluster.state(), cluster.counters()
        assert number == 5
        assert all(part["base"] for part in versions.manifest(5)["tables"]["t"]["parts"])
        with table_cluster(3, **{**OPTIONS, "max_rows": 100}) as other:
            assert restored(other, versions, number) == state


@pytest.mark.parametrize("is_compacted", [False, True])
def test_killed_writer_leaves_a_version_whole_or_absent(
    versions, monkeypatch, is_compacted
) -> None:
    with table_cluster(1, **OPTIONS) as cluster, table_cluster(1, **OPTIONS) as reader:
        states = saved_versions(cluster, versions)
        disk = Disk(monkeypatch)
        seen: set[int] = set()
        last = 4
        for operations in range(1, 40):
            cluster.train(range(operations, operations + 1))
            state = cluster.state(), cluster.counters()
            disk.left, before = operations, disk.used
            try:
                if is_compacted:
                    compact(versions, last)
                else:
                    cluster.tables.save(versions, since=last)
            except (KilledError, ServerError):
                pass
            is_whole = disk.left > 0
            disk.left = 10**9
            new = [number for number in versions.numbers if number > last]
            states |= dict.fromkeys(new, state)
            last = versions.numbers[-1]
            seen.add(len(new))
            for number in {last, min(versions.numbers)}:
                assert restored(reader, versions, number) == states[number]
            if is_whole:
                break
        assert disk.used - before < 40
        if is_compacted:
            assert versions.numbers == [4]
        else:
            assert seen == {0, 1}
        unfinished = {one.name for one in versions.folder.iterdir()}
        number = cluster.tables.save(versions)
        assert {one.name for one in versions.folder.iterdir()} <= unfinished | {f"{number:08d}"}
        assert [*map(int, sorted(os.listdir(versions.folder)))] == versions.numbers
        assert restored(reader, versions, number) == (cluster.state(), cluster.counters())


def test_compaction_holds_a_piece_of_a_table(versions, monkeypatch) -> None:
    monkeypatch.setattr(shards, "_PIECE_BYTES", 2**17)
    held: list[int] = []
    add = TableFileWriter.add
    monkeypatch.setattr(
        TableFileWriter,
        "add",
        lambda self, part: (held.append(len(part.value)), add(self, part))[1],
    )
    with table_cluster(1) as cluster:
        keys = np.arange(30_000)
        for _ in range(2):
            for begin in range(0, len(keys), 10_000):
                part = keys[begin : begin + 10_000]
                cluster.client.push({}, {"t": (part, np.ones((len(part), 2), np.float32))})
            number = cluster.tables.save(versions)
        cluster.client.push({}, {"t": (keys[::3], np.ones((10_000, 2), np.float32))})
        number = cluster.tables.save(versions, since=number)
        compact(versions, number)
        assert max(held) < len(keys) / 5
        state = cluster.state()
        assert restored(cluster, versions, number)[0] == state
        assert versions.manifest(number)["tables"]["t"]["parts"][0]["rows"] == len(keys)
