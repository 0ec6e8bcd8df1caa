"""Checkpoints of variables whose rows are on servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import DataLossError
from stratagem.parameter_server.client.table_client import TableClient
from tests.unit.parameter_server.table_clusters import TableCluster, table_cluster

EVICTING = {"eviction": {"kind": "LeastFrequent"}, "max_rows": 30}


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
def objects() -> Iterator[Objects]:
    with table_cluster(2, **EVICTING) as cluster:
        cluster.create("u", **EVICTING)
        yield Objects(cluster, a="t", b="u")


@pytest.mark.parametrize("is_async", [False, True])
def test_manager_keeps_and_removes_tables(objects, tmp_path, is_async) -> None:
    manager = sg.train.CheckpointManager(objects.checkpoint, tmp_path, max_to_keep=2)
    states = []
    for step in range(4):
        objects.train(range(step, step + 1))
        manager.save(options=sg.train.CheckpointOptions(enable_async=is_async))
        states.append(objects.state)
    manager.sync()
    assert sorted(os.listdir(tmp_path)) == ["ckpt-3", "ckpt-4", "ckpt-tables"]
    for path, state in zip(manager.checkpoints, states[2:], strict=True):
        objects.checkpoint.restore(path)
        assert objects.state == state
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert objects.state == states[-1]


def test_failed_save_leaves_nothing(objects, tmp_path, monkeypatch) -> None:
    objects.train(range(3))

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    for target, name in (
        ("stratagem.checkpoint.saving.write", "write"),
        ("stratagem.group.transport.journal.os.fsync", "fsync"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, fail)
            with pytest.raises(OSError, match="disk full"):
                objects.checkpoint.save(tmp_path / name)
    assert not os.listdir(tmp_path)
    assert int(objects.checkpoint.save_counter) == 0


def test_save_that_is_killed_is_whole_or_absent(objects, tmp_path, monkeypatch) -> None:
    """Killed before Orbax writes, and after that, before the tables are in the checkpoint."""

    class KilledError(BaseException):
        pass

    def kill(*arguments: object, **options: object) -> None:
        raise KilledError

    manager = sg.train.CheckpointManager(objects.checkpoint, tmp_path, None)
    objects.train(range(2))
    objects.checkpoint.save(tmp_path / "ckpt")
    saved = objects.state
    objects.train(range(2, 4))
    with monkeypatch.context() as patch:
        patch.setattr("stratagem.checkpoint.saving.write", kill)
        with pytest.raises(KilledError):
            objects.checkpoint.save(tmp_path / "ckpt")
    assert len(manager.checkpoints) == 1
    manager.restore_or_initialize()
    assert objects.state == saved
    objects.train(range(4, 6))
    saved = objects.state
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", kill)
        with pytest.raises(KilledError):
            objects.checkpoint.save(tmp_path / "ckpt")
    assert len(manager.checkpoints) == 2
    assert len([name for name in os.listdir(tmp_path) if name.startswith(".")]) == 1
    objects.train(range(6, 8))
    manager.restore_or_initialize()
    assert objects.state == saved
    objects.train(range(8, 9))
    objects.checkpoint.save(
        tmp_path / "ckpt"
    )  # the second save removed the rows of the first killed one; this one moves them
    assert sorted(os.listdir(tmp_path)) == ["ckpt-1", "ckpt-2", "ckpt-3"]
    objects.checkpoint.restore(manager.checkpoints[1])
    assert objects.state == saved


def test_damaged_rows_change_nothing(objects, tmp_path) -> None:
    objects.train(range(3))
    path = objects.checkpoint.save(tmp_path / "ckpt")
    objects.train(range(3, 6))
    state = objects.state
    file = Path(path) / "tables" / "0" / "00000001" / "u-1.rows"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataLossError, match=r"u-1\.rows cannot be read: the record"):
        objects.checkpoint.restore(path)
    assert objects.state == state
    file.unlink()
    with pytest.raises(DataLossError, match=r"u-1\.rows cannot be read: it is missing"):
        objects.checkpoint.restore(path)
    (file.parent / "manifest.json").unlink()
    with pytest.raises(DataLossError, match=r"manifest\.json cannot be read: it is missing"):
        objects.checkpoint.restore(path)
    assert objects.state == state
