"""Checkpoints of tables on servers and in memory: each is restored as it was."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint import in_memory
from stratagem.checkpoint import latest as group_calls
from stratagem.checkpoint.in_memory import MemoryBackup
from stratagem.errors import DataLossError
from stratagem.parameter_server.client.table_client import TableClient
from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from tests.unit.checkpoint.groups import Reader
from tests.unit.parameter_server.table_clusters import TableCluster, table_cluster

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
    with pytest.raises(ValueError, match="CheckpointManager received full_tables_every=0"):
        Series(objects, tmp_path, full_tables_every=0)
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


class KilledError(BaseException):
    pass


def _kill(*arguments: object, **options: object) -> None:
    raise KilledError


def _fail(*arguments: object, **options: object) -> None:
    raise OSError("disk full")


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
    series = Series(objects, tmp_path, max_to_keep=3)
    series.save()
    series.save()
    with monkeypatch.context() as patch:
        patch.setattr(target, _kill if is_killed else _fail)
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
            patch.setattr(other.client, "ask_about_tables", _fail)
            with pytest.raises(OSError, match="disk full"):
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


# In-memory backups after each step.

ROWS = np.random.default_rng(0).random((40, 3)).astype("float32")


def build(num_devices: int, seed: int) -> tuple[Any, keras.Model, Any, Reader]:
    keras.utils.set_random_seed(seed)
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(num_devices)])
    with strategy.scope():
        layers = keras.layers
        parts = [layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
        model = keras.Sequential([layers.Input((3,)), *parts])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        part = sg.Variable(0.0, synchronization="on_read", aggregation="sum")
    reader = Reader({"at": 0})
    return strategy, model, sg.train.Checkpoint(model=model, part=part, reader=reader), reader


def train(model: keras.Model) -> Any:
    return model.fit(ROWS, ROWS[:, :1], batch_size=8, shuffle=False, verbose=0).history


def weights(model: keras.Model) -> list[Any]:
    return [np.array(variable.value) for variable in model.variables]


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_resumes_bit_for_bit(num_devices: int, tmp_path: Path) -> None:
    _, model, checkpoint, reader = build(num_devices, seed=1)
    train(model)
    reader.state = {"at": 5}
    memory = MemoryBackup(checkpoint, tmp_path)
    memory.save(5)
    wanted = train(model), weights(model)

    _, again, checkpoint, reader = build(num_devices, seed=2)
    train(again)
    assert MemoryBackup(checkpoint, tmp_path).restore() == 5
    assert reader.state == {"at": 5}
    history = train(again)
    assert history == wanted[0]
    for one, other in zip(weights(again), wanted[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_restored_values_do_not_alias_later_snapshots(tmp_path: Path) -> None:
    variable = sg.Variable(np.zeros(1000, "float32"))
    memory = MemoryBackup(sg.train.Checkpoint(variable=variable), tmp_path)
    for step in (1, 2):
        variable.assign(np.full(1000, step, "float32"))
        memory.save(step)
    assert memory.restore() == 2
    kept = variable.value
    for step in (3, 4, 5):
        variable.assign(np.full(1000, step, "float32"))
        memory.save(step)
    assert (np.asarray(kept) == 2).all()


def test_without_any_or_of_other_objects_nothing_changes(tmp_path: Path) -> None:
    variable = sg.Variable(np.zeros(3, "float32"))
    assert MemoryBackup(sg.train.Checkpoint(variable=variable), tmp_path).restore() is None
    MemoryBackup(sg.train.Checkpoint(variable=variable), tmp_path).save(1)
    for other in (
        sg.train.Checkpoint(variable=sg.Variable(np.ones(4, "float32"))),
        sg.train.Checkpoint(variable=sg.Variable(np.ones(3, "int32"))),
        sg.train.Checkpoint(other=sg.Variable(np.ones(3, "float32"))),
        sg.train.Checkpoint(variable=sg.Variable(np.ones(3, "float32")), reader=Reader()),
    ):
        MemoryBackup(sg.train.Checkpoint(variable=variable), tmp_path).save(1)
        assert MemoryBackup(other, tmp_path).restore() is None
    assert (np.asarray(variable.value) == 0).all()


@pytest.mark.parametrize(
    ("others", "expected"), [([2, 1], 2), ([1], 1), ([3, 2], 2), ([], None), ([5, 4], None)]
)
def test_all_processes_go_on_from_the_newest_that_each_has(
    others: list[int], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        process_id = 0
        num_processes = 2
        identity = SimpleNamespace(labels=("worker 0", "worker 1"))

        def exchange(self, name: str, value: Any, **_: Any) -> list[Any]:
            return [value, others if name == "MemoryBackup.restore" and value == [2, 1] else value]

    variable = sg.Variable(0)
    memory = MemoryBackup(sg.train.Checkpoint(variable=variable), tmp_path)
    for step in (1, 2):
        variable.assign(step)
        memory.save(step)
    variable.assign(9)
    monkeypatch.setattr(in_memory, "current_group", Group)
    monkeypatch.setattr(group_calls, "current_group", Group)
    assert memory.restore() == expected
    assert int(variable) == (9 if expected is None else expected)
    monkeypatch.undo()
    again = MemoryBackup(sg.train.Checkpoint(variable=sg.Variable(0)), tmp_path)
    assert again.restore() == expected


# Full disks, read-only disks and lost files raise errors and harm nothing else.

_DISK_BYTES = 4 * 2**20


def _mount(folder: Path, *options: str) -> bool:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small separate disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        if not _mount(folder, f"size={_DISK_BYTES}"):
            pytest.skip("only root may mount a disk")
    except FileNotFoundError:
        pytest.skip("there is no mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _noise(count: int) -> np.ndarray:
    """Values that do not compress."""
    return np.random.default_rng(count).random(count)


def _fill(disk: Path) -> dict[str, Any]:
    return {"large": sg.Variable(_noise(3 * 10**6))}


def _make_read_only(disk: Path) -> dict[str, Any]:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    return {}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("spoil", "words"), [(_fill, "no space|quota|exhausted"), (_make_read_only, "read-only")]
)
def test_disk_that_cannot_be_written(is_async: bool, spoil: Any, words: str, disk: Path) -> None:
    small = sg.Variable(1.0)
    manager = sg.train.CheckpointManager(sg.train.Checkpoint(value=small), disk, max_to_keep=2)
    good = manager.save()
    other = sg.train.Checkpoint(value=small, **spoil(disk))
    small.assign(2.0)
    options = sg.train.CheckpointOptions(enable_async=is_async)

    def save() -> None:
        other.save(disk / "ckpt-other", options)
        other.sync()

    with pytest.raises(OSError, match=rf"(?is)could not be written.*({words})"):
        save()
    assert sorted(path.name for path in disk.iterdir()) == ["ckpt-1"]
    assert manager.restore_or_initialize() == good
    assert float(small) == 1.0
    if spoil is _fill:
        manager.save(options=options)  # and goes on where there is room
        manager.sync()
        assert [Path(path).name for path in manager.checkpoints] == ["ckpt-1", "ckpt-2"]


def test_lack_of_memory_raises_and_keeps_the_older_state(disk: Path) -> None:
    value = sg.Variable(np.full(10, 1.0))
    memory = MemoryBackup(sg.train.Checkpoint(value=value), disk)
    memory.save(1)
    large = MemoryBackup(sg.train.Checkpoint(value=value, large=sg.Variable(_noise(10**6))), disk)
    large.restore()  # of other objects: nothing, and what was there is forgotten
    memory.save(1)
    with pytest.raises(OSError, match="No space left"):
        MemoryBackup(sg.train.Checkpoint(value=sg.Variable(_noise(2 * 10**6))), disk).save(2)
    value.assign(np.zeros(10))
    assert memory.restore() == 1
    assert (np.asarray(value.value) == 1).all()


# Checkpoints of variables whose rows are on servers.


FEW_ROWS = {"eviction": {"kind": "LeastFrequent"}, "max_rows": 30}


class Table(keras.Variable):
    """As a keyed table: its rows are on the servers alone."""

    def __init__(self, cluster: TableCluster, name: str) -> None:
        super().__init__(np.zeros((0, 2), np.float32), name=f"variable_of_{name}")
        self.remote_table: Any = TableClient(cluster.client), name


class Objects:
    """Two tables and a number, in a checkpoint."""

    def __init__(self, cluster: TableCluster, **names: str) -> None:
        self.cluster = cluster
        self.step = keras.Variable(0, dtype="int32")
        self.checkpoint = sg.train.Checkpoint(
            tables={key: Table(cluster, name) for key, name in names.items()}, step=self.step
        )

    def train(self, steps: range) -> None:
        for name in self.cluster.tables.layouts:
            self.cluster.train(steps, name)
        self.step.assign(steps.stop)

    @property
    def state(self) -> list[object]:
        states = [self.cluster.state(name) for name in sorted(self.cluster.tables.layouts)]
        return [int(self.step), *states]


@pytest.fixture
def two_tables() -> Iterator[Objects]:
    with table_cluster(2, **FEW_ROWS) as cluster:
        cluster.create("u", **FEW_ROWS)
        yield Objects(cluster, a="t", b="u")


@pytest.mark.parametrize("is_async", [False, True])
def test_manager_keeps_and_removes_tables(two_tables, tmp_path, is_async) -> None:
    manager = sg.train.CheckpointManager(two_tables.checkpoint, tmp_path, max_to_keep=2)
    states = []
    for step in range(4):
        two_tables.train(range(step, step + 1))
        manager.save(options=sg.train.CheckpointOptions(enable_async=is_async))
        states.append(two_tables.state)
    manager.sync()
    assert sorted(os.listdir(tmp_path)) == ["ckpt-3", "ckpt-4", "ckpt-tables"]
    for path, state in zip(manager.checkpoints, states[2:], strict=True):
        two_tables.checkpoint.restore(path)
        assert two_tables.state == state
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert two_tables.state == states[-1]


def test_failed_save_leaves_nothing(two_tables, tmp_path, monkeypatch) -> None:
    two_tables.train(range(3))
    for target, name in (
        ("stratagem.checkpoint.saving.write", "write"),
        ("stratagem.group.transport.journal.os.fsync", "fsync"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, _fail)
            with pytest.raises(OSError, match="disk full"):
                two_tables.checkpoint.save(tmp_path / name)
    assert not os.listdir(tmp_path)
    assert int(two_tables.checkpoint.save_counter) == 0


def test_save_that_is_killed_is_whole_or_absent(two_tables, tmp_path, monkeypatch) -> None:
    """Killed before Orbax writes, and after that, before the tables are in the checkpoint."""

    manager = sg.train.CheckpointManager(two_tables.checkpoint, tmp_path, None)
    two_tables.train(range(2))
    two_tables.checkpoint.save(tmp_path / "ckpt")
    saved = two_tables.state
    two_tables.train(range(2, 4))
    with monkeypatch.context() as patch:
        patch.setattr("stratagem.checkpoint.saving.write", _kill)
        with pytest.raises(KilledError):
            two_tables.checkpoint.save(tmp_path / "ckpt")
    assert len(manager.checkpoints) == 1
    manager.restore_or_initialize()
    assert two_tables.state == saved
    two_tables.train(range(4, 6))
    saved = two_tables.state
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _kill)
        with pytest.raises(KilledError):
            two_tables.checkpoint.save(tmp_path / "ckpt")
    assert len(manager.checkpoints) == 2
    assert len([name for name in os.listdir(tmp_path) if name.startswith(".")]) == 1
    two_tables.train(range(6, 8))
    manager.restore_or_initialize()
    assert two_tables.state == saved
    two_tables.train(range(8, 9))
    # The second save removed the rows of the first killed one; this one moves them.
    two_tables.checkpoint.save(tmp_path / "ckpt")
    assert sorted(os.listdir(tmp_path)) == ["ckpt-1", "ckpt-2", "ckpt-3"]
    two_tables.checkpoint.restore(manager.checkpoints[1])
    assert two_tables.state == saved


def test_damaged_rows_change_nothing(two_tables, tmp_path) -> None:
    two_tables.train(range(3))
    path = two_tables.checkpoint.save(tmp_path / "ckpt")
    two_tables.train(range(3, 6))
    state = two_tables.state
    file = Path(path) / "tables" / "0" / "00000001" / "u-1.rows"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataLossError, match=r"u-1\.rows cannot be read: the record"):
        two_tables.checkpoint.restore(path)
    assert two_tables.state == state
    file.unlink()
    with pytest.raises(DataLossError, match=r"u-1\.rows cannot be read: it is missing"):
        two_tables.checkpoint.restore(path)
    (file.parent / "manifest.json").unlink()
    with pytest.raises(DataLossError, match=r"manifest\.json cannot be read: it is missing"):
        two_tables.checkpoint.restore(path)
    assert two_tables.state == state
