"""One full version in place of several, and versions that are killed while they are written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from stratagem.errors import DataLossError, NotFoundError
from stratagem.group.transport.connection import ServerError
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server import shards
from stratagem.parameter_server.server.tables.saved_tables import (
    CHECKPOINT,
    TableFileWriter,
    TableVersions,
    base_of_next,
    file_name,
    remove_unneeded,
)
from stratagem.parameter_server.server.tables.table_chains import compact
from tests.unit.parameter_server.server.tables.test_tiered_journal import KilledError
from tests.unit.parameter_server.table_clusters import TableCluster, table_cluster

OPTIONS = {
    "admission": {"kind": "AfterSightings", "sightings": 2},
    "eviction": {"kind": "LeastFrequent"},
    "max_rows": 40,
}


class Disk:
    """Ends after some operations; nothing is written or removed from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 10**9
        self.used = 0
        paths = [(Path, name) for name in ("replace", "unlink", "mkdir")]
        for owner, name in ((os, "fsync"), (shutil, "rmtree"), *paths):
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


@pytest.mark.parametrize("order", [(2, 3, 4), (3, 2, 4), (4, 3, 2)])
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


# Versions of a series of checkpoints: what the next one continues, and what nothing needs.


class Versions(TableVersions):
    """Versions of one table in two files, the second of which is always full."""

    def add(self, size_bytes: int, base: int | None = None, checkpoint: str = "") -> int:
        number = self.begin()
        parts = [
            {
                "file": f"{number:08d}/t-0.rows",
                "size_bytes": size_bytes,
                "base": base and str(base),
            },
            {"file": f"{number:08d}/t-1.rows", "size_bytes": 1, "base": None},
        ]
        for part in parts:
            (self.folder / part["file"]).write_bytes(bytes(part["size_bytes"]))
        fields = {"save": str(number), "base": base, CHECKPOINT: checkpoint or f"ckpt-{number}"}
        self.write_manifest(number, {**fields, "tables": {"t": {"parts": parts}}})
        return number


@pytest.fixture
def series(tmp_path) -> Versions:
    return Versions(tmp_path)


def test_next_version_continues_a_whole_one_until_it_is_time_for_all_rows(series) -> None:
    assert base_of_next(series, None, 3) is None
    assert base_of_next(series, "ckpt-1", 3) is None
    series.add(100)
    assert base_of_next(series, "ckpt-1", 3) == 1
    assert base_of_next(series, "ckpt-1", 2) == 1
    assert base_of_next(series, "ckpt-1", 1) is None
    series.add(10, 1)
    assert base_of_next(series, "ckpt-2", 3) == 2
    assert base_of_next(series, "ckpt-2", 2) is None
    series.add(10, 2)
    assert base_of_next(series, "ckpt-3", 4) == 3
    assert base_of_next(series, "ckpt-3", 3) is None
    assert base_of_next(series, "ckpt-1", 3) == 1  # training continued from there
    series.add(10, 1, "ckpt-2")
    assert base_of_next(series, "ckpt-2", 3) == 4  # it was saved again
    assert base_of_next(series, "ckpt-3", 9) == 3
    series.add(60, 3, "large")
    assert base_of_next(series, "large", 9) == 5
    series.add(60, 5, "larger")  # these changes are more than the rows
    assert base_of_next(series, "larger", 9) is None
    file = series.path(1) / "t-0.rows"
    for damage in (lambda: file.write_bytes(b"torn"), file.unlink, lambda: series.remove(1)):
        damage()
        assert base_of_next(series, "ckpt-3", 9) is None


def keep_for(versions: TableVersions, checkpoints: list[str]) -> None:
    remove_unneeded(versions, lambda _, manifest: manifest.get(CHECKPOINT) in checkpoints)


def test_versions_that_no_checkpoint_needs_are_removed(series) -> None:
    for base in (None, 1, 2, None, 4, 3, 5):
        series.add(10, base)
    keep_for(series, [])
    assert len(series.numbers) == 7  # their checkpoints may be about to be written
    keep_for(series, ["ckpt-3", "ckpt-5", "ckpt-9"])
    assert series.numbers == [1, 2, 3, 4, 5, 6, 7]
    keep_for(series, ["ckpt-5"])
    assert series.numbers == [4, 5, 6, 7]
    (series.path(7) / "manifest.json").write_bytes(b"torn")
    keep_for(series, ["ckpt-6"])
    assert series.numbers == [4, 5, 6, 7]
    series.remove(7)
    keep_for(series, ["ckpt-6"])
    assert series.numbers == [6]
    # A server that was restarted saved all rows, although changes were requested.
    number = series.begin()
    part = {"file": f"{number:08d}/t-0.rows", "size_bytes": 0, "base": None}
    fields = {"save": "7", "base": 6, CHECKPOINT: "ckpt-7", "tables": {"t": {"parts": [part]}}}
    series.write_manifest(number, fields)
    keep_for(series, ["ckpt-7"])
    assert series.numbers == [number]


# Versions in a folder, and each kind of damage.


def fields_of(number: int, base: int | None) -> dict[str, object]:
    part = {
        "file": file_name(number, "a/b", 0),
        "base": base and f"save {base}",
        "size_bytes": number,
        "buckets": [0, 4096],
    }
    return {"save": f"save {number}", "base": base, "tables": {"a/b": {"parts": [part]}}}


@pytest.fixture
def chained(tmp_path) -> TableVersions:
    versions = TableVersions(tmp_path / "saved")
    for base in (None, 1, 2):
        number = versions.begin()
        versions.write_manifest(number, fields_of(number, base))
    return versions


def test_versions_count_up_and_continue_each_other(chained) -> None:
    assert chained.numbers == [1, 2, 3]
    assert chained.chain(3, "a/b", 0) == {
        "files": [(f"{one:08d}/a%2Fb-0.rows", one, f"save {one}") for one in (3, 2, 1)],
        "buckets": [0, 4096],
    }
    assert chained.manifest(2)["base"] == 1
    assert chained.begin() == 4  # which does not count before its end
    assert chained.numbers == [1, 2, 3]
    assert chained.begin() == 5  # a server may still write to the former
    assert not chained.path(4).exists()


def test_chosen_version(chained, tmp_path) -> None:
    assert (chained.latest, chained.chosen(None), chained.chosen(1)) == (None, 3, 1)
    chained.publish(2)
    assert (chained.latest, chained.chosen(None), chained.chosen(3)) == (2, 2, 3)
    assert TableVersions(chained.folder).latest == 2
    with pytest.raises(NotFoundError, match=r"no version 7 of tables.\nExpected one of its ver"):
        chained.chosen(7)
    with pytest.raises(NotFoundError, match="has no versions of tables"):
        TableVersions(tmp_path).chosen(None)
    chained.remove(2)
    with pytest.raises(NotFoundError, match="no version 2 of tables"):
        chained.chosen(None)
    (chained.folder / "LATEST").write_text("two")
    with pytest.raises(DataLossError, match="LATEST cannot be read: it is no number"):
        chained.chosen(None)


def test_damaged_manifest(chained) -> None:
    path = chained.path(2) / "manifest.json"
    text = path.read_text()
    saved = json.loads(text)
    for wrong, how in (
        (text[:-9], "it is no manifest"),
        ("[1]", "it is no manifest"),
        (text.replace("save 1", "save 9"), "its checksum is wrong"),
        (json.dumps({**saved, "crc32": 3}), "its checksum is wrong"),
    ):
        path.write_text(wrong)
        with pytest.raises(DataLossError, match=f"00000002/manifest.json cannot be read: {how}"):
            chained.chain(3, "a/b", 0)
    path.unlink()
    with pytest.raises(DataLossError, match=r"manifest\.json cannot be read: it is missing"):
        chained.chain(3, "a/b", 0)
    chained.write_manifest(2, {**fields_of(2, 1), "save": "another"})
    with pytest.raises(DataLossError, match="the next version does not continue this one"):
        chained.chain(3, "a/b", 0)
    (chained.path(3) / "manifest.json").rename(path)
    with pytest.raises(DataLossError, match="it is version 3 of format 1"):
        chained.manifest(2)


# A table with rows on disk on a running server without a journal.


def test_server_without_a_journal_removes_its_rows(tmp_path) -> None:
    tiers = {"memory_bytes": 50 * 2 * 2 * 4, "folder": str(tmp_path / "disk")}
    pull = Message("pull_rows", {"names": ["t"]})
    with table_cluster(1, with_table=False) as cluster:
        (server,) = cluster.servers
        assert server._is_short(pull)
        cluster.create(tiers=tiers)
        cluster.train(range(60))
        # Other requests do not wait while this one waits for the disk.
        assert not server._is_short(pull)
        (table,) = cluster.client.describe()[0]["tables"].values()
        assert table["hot"] <= 70 < table["rows"]
    assert not (tmp_path / "disk").exists()
