"""In-memory backups after each step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint import in_memory
from stratagem.checkpoint import latest as group_calls
from stratagem.checkpoint.in_memory import MemoryBackup

ROWS = np.random.default_rng(0).random((40, 3)).astype("float32")


class Reader:
    def __init__(self) -> None:
        self.state: Any = {"at": 0}

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def build(num_devices: int, seed: int) -> tuple[Any, keras.Model, Any, Reader]:
    keras.utils.set_random_seed(seed)
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(num_devices)])
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((3,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        part = sg.Variable(0.0, synchronization="on_read", aggregation="sum")
    reader = Reader()
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


@pytest.mark.slow
def test_each_replica_gets_its_own_part(tmp_path: Path) -> None:
    strategy, model, checkpoint, _ = build(2, seed=1)
    train(model)
    part = checkpoint.parts()["part"].variables["value"]

    def add() -> None:
        replica = sg.get_replica_context().replica_id_in_sync_group
        part.assign_add(jnp.asarray(replica, "float32") + 1.0)

    strategy.run(add)
    memory = MemoryBackup(checkpoint, tmp_path)
    memory.save(1)
    part.assign(8.0)
    assert memory.restore() == 1
    assert np.asarray(part.storage).tolist() == [1.0, 2.0]


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
