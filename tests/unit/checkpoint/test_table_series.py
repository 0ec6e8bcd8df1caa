"""Checkpoints of a manager have the changed rows of tables, and restore each as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from stratagem.parameter_server.server.tables.table_versions import TableVersions
from tests.unit.checkpoint.test_remote_tables import Objects, Table
from tests.unit.parameter_server.table_clusters import table_cluster

# Large enough that a step changes a small part of the rows, and evicts some.
EVICTING = {"eviction": {"kind": "LeastRecent"}, "max_rows": 160}


@pytest.fixture
def objects() -> Iterator[Objects]:
    with table_cluster(2, **EVICTING) as cluster:
        cluster.create("u", **EVICTING)
        made = Objects(cluster, a="t", b="u")
        made.train(range(100, 125))
        yield made


class Series:
    """A manager, and the states that it saved."""

    def __init__(self, objects: Objects, folder: Path, **options: Any) -> None:
        self.objects = objects
        self.manager = sg.train.CheckpointManager(
            objects.checkpoint, folder, **{"max_to_keep": None, **options}
        )
        self.states: dict[str, list[object]] = {}
        self._step = 0

    def save(self, *, is_async: bool = False) -> str:
        """Trains and saves. Each step changes some of the rows."""
        self.objects.train(range(self._step, self._step + 1))
        self._step += 1
        options = sg.train.CheckpointOptions(enable_async=is_async)
        path = self.manager.save(options=options)
        assert path is not None
        self.states[path] = self.objects.state
        return path

    def check(self) -> None:
        """Restores each checkpoint, and the last one on other servers, too."""
        *_, last = paths = self.manager.checkpoints
        for path in paths:
            self.objects.checkpoint.restore(path)
            assert self.objects.state == self.states[path]
        with table_cluster(3, name="t", max_rows=900) as cluster:
            cluster.create("u", max_rows=900)
            other = Objects(cluster, a="t", b="u")
            other.checkpoint.restore(last).assert_consumed()
            assert other.state == self.states[last]


def versions_in(folder: Path) -> TableVersions:
    return TableVersions(folder / "ckpt-tables" / "0")


def bases_in(folder: Path) -> dict[int, bool]:
    """Whether each version has only changes, by number."""
    versions = versions_in(folder)
    return {
        number: any(
            part["base"] is not None
            for table in versions.manifest(number)["tables"].values()
            for part in table["parts"]
        )
        for number in versions.numbers
    }


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_one_of_some_checkpoints_has_all_rows(objects, tmp_path, is_async) -> None:
    series = Series(objects, tmp_path, full_tables_every=3)
    for _ in range(5):
        series.save(is_async=is_async)
    series.manager.sync()
    assert bases_in(tmp_path) == {1: False, 2: True, 3: True, 4: False, 5: True}
    assert not any((tmp_path / "ckpt-5" / name).exists() for name in ("tables",))
    series.check()


@pytest.mark.slow
def test_base_of_a_kept_checkpoint_stays(objects, tmp_path) -> None:
    series = Series(objects, tmp_path, full_tables_every=4, max_to_keep=2)
    kept = []
    for _ in range(7):
        series.save()
        kept.append(versions_in(tmp_path).numbers)
    # 3 and 4 need 1 and 2; 5 has all rows, and 6 and 7 continue it
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [5, 6], [5, 6, 7]]
    assert sorted(os.listdir(tmp_path)) == ["ckpt-6", "ckpt-7", "ckpt-tables"]
    series.check()


def test_all_rows_each_time(objects, tmp_path) -> None:
    series = Series(objects, tmp_path, full_tables_every=1, max_to_keep=1)
    for _ in range(3):
        series.save()
    assert bases_in(tmp_path) == {3: False}
    series.check()
    with pytest.raises(ValueError, match=r"full_tables_every=0 is no number of checkpoints"):
        Series(objects, tmp_path, full_tables_every=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "is_killed"),
    [
        ("stratagem.checkpoint.saving.write", False),
        ("stratagem.checkpoint.saving.write", True),
        ("stratagem.group.transport.journal.os.fsync", False),
    ],
)
def test_failed_save_breaks_no_chain(objects, tmp_path, monkeypatch, target, is_killed) -> None:
    class KilledError(BaseException):
        pass

    def fail(*arguments: object, **options: object) -> None:
        raise KilledError if is_killed else OSError("disk full")

    series = Series(objects, tmp_path, max_to_keep=3)
    series.save()
    series.save()
    with monkeypatch.context() as patch:
        patch.setattr(target, fail)
        with pytest.raises((OSError, KilledError)):
            series.save()
    assert len(series.manager.checkpoints) == 2
    series.save()
    assert bases_in(tmp_path)[versions_in(tmp_path).numbers[-1]]
    series.save()
    series.save()
    assert not any(one.name.startswith(".") for one in tmp_path.iterdir())
    assert len(series.manager.checkpoints) == 3
    series.check()


@pytest.mark.slow
def test_groups_of_servers_are_saved_together_or_not_at_all(objects, tmp_path, monkeypatch) -> None:
    with table_cluster(1, name="x", **EVICTING) as other:
        tables = {"a": Table(objects.cluster, "t"), "b": Table(other, "x")}
        checkpoint = sg.train.Checkpoint(tables=tables)
        manager = sg.train.CheckpointManager(checkpoint, tmp_path, max_to_keep=None)
        manager.save()
        with monkeypatch.context() as patch:
            patch.setattr(other.client, "ask_about_tables", failing)
            with pytest.raises(OSError, match="no space"):
                manager.save()
        folders = [TableVersions(tmp_path / "ckpt-tables" / group) for group in "01"]
        assert [one.numbers for one in folders] == [[1], [1]]
        manager.save()
        assert [one.numbers for one in folders] == [[1, 2], [1, 2]]
        state = objects.cluster.state(), other.state("x")
        objects.train(range(3))
        other.train(range(3), "x")
        assert (objects.cluster.state(), other.state("x")) != state
        manager.restore_or_initialize()
        assert (objects.cluster.state(), other.state("x")) == state


def failing(*arguments: object, **options: object) -> None:
    raise OSError("no space")


@pytest.mark.slow
def test_next_process_continues(objects, tmp_path) -> None:
    first = Series(objects, tmp_path)
    first.save()
    first.save()
    for restores in (True, False):
        with table_cluster(2, **EVICTING) as cluster:
            cluster.create("u", **EVICTING)
            other = Objects(cluster, a="t", b="u")
            series = Series(other, tmp_path)
            series.states = first.states
            if restores:
                series.manager.restore_or_initialize()
            series.save()
            newest = versions_in(tmp_path).numbers[-1]
            assert bases_in(tmp_path)[newest] == restores  # new servers remember what they loaded
            series.check()


@pytest.mark.slow
def test_restore_of_an_earlier_checkpoint_is_continued(objects, tmp_path) -> None:
    series = Series(objects, tmp_path)
    paths = [series.save() for _ in range(3)]
    objects.checkpoint.restore(paths[0])  # the manager does not know
    series.save()
    assert not bases_in(tmp_path)[4]
    assert series.manager.restore_or_initialize() == series.manager.latest_checkpoint
    series.save()
    assert bases_in(tmp_path)[5]
    series.check()


@pytest.mark.slow
def test_damaged_base_is_not_continued(objects, tmp_path) -> None:
    series = Series(objects, tmp_path)
    paths = [series.save() for _ in range(2)]
    (versions_in(tmp_path).path(2) / "t-0.rows").write_bytes(b"torn")
    paths.append(series.save())
    assert bases_in(tmp_path)[3] is False
    with pytest.raises(sg.errors.DataLossError, match=r"00000002/t-0\.rows cannot be read"):
        objects.checkpoint.restore(paths[1])
    objects.checkpoint.restore(paths[2])
    assert objects.state == series.states[paths[2]]
    (versions_in(tmp_path).path(3) / "manifest.json").write_bytes(b"torn")
    assert series.manager.restore_or_initialize(skip_damaged=True) == paths[0]
    assert objects.state == series.states[paths[0]]
    path = series.save()
    objects.checkpoint.restore(path)
    assert objects.state == series.states[path]
