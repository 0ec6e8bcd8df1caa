"""Numbered checkpoints in one folder."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint import manager as manager_module
from stratagem.checkpoint.policies import KeepLatest


def make(folder: Path, max_to_keep: Any = 3, **kwargs: Any) -> tuple[Any, Any]:
    step = sg.Variable(0, dtype="int32")
    checkpoint = sg.train.Checkpoint(step=step)
    return step, sg.train.CheckpointManager(checkpoint, folder, max_to_keep, **kwargs)


def names(manager: Any) -> list[str]:
    return [Path(path).name for path in manager.checkpoints]


def test_newest_are_kept_and_the_latest_is_restored(tmp_path: Path) -> None:
    begun: list[bool] = []
    options: Any = {"max_to_keep": 2, "init_fn": lambda: begun.append(True)}
    step, manager = make(tmp_path / "run", **options)
    assert manager.latest_checkpoint is None
    assert manager.restore_or_initialize() is None
    assert begun == [True]
    for value, number in ((5, None), (6, 9), (7, 10)):  # which are compared as numbers
        step.assign(value)
        manager.save(number)
    assert names(manager) == ["ckpt-9", "ckpt-10"]
    assert sorted(os.listdir(tmp_path / "run")) == ["ckpt-10", "ckpt-9"]

    again, other = make(tmp_path / "run", **options)
    assert other.latest_checkpoint == str(tmp_path / "run" / "ckpt-10")
    assert other.restore_or_initialize() == other.latest_checkpoint
    assert (int(again), begun) == (7, [True])
    latest = other.save(11)
    assert names(other) == ["ckpt-10", "ckpt-11"]
    (Path(latest) / "commit_success.txt").unlink()  # what is unfinished is never the latest
    (tmp_path / "run" / "ckpt-12.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "run" / "ckpt-x").mkdir()
    assert names(other) == ["ckpt-10"]


def test_hourly_checkpoints_are_kept_besides_the_newest(tmp_path: Path) -> None:
    _, manager = make(tmp_path, KeepLatest(1), keep_checkpoint_every_n_hours=2)
    for hour in range(5):
        path = manager.save()
        os.utime(path, (3600 * hour, 3600 * hour))
    manager.save()
    assert names(manager) == ["ckpt-1", "ckpt-3", "ckpt-5", "ckpt-6"]


def test_interval_counts_steps_since_the_last_save_or_restore(tmp_path: Path) -> None:
    def run(step: Any, manager: Any, until: int) -> list[int]:
        saved = []
        for value in range(int(step) + 1, until):
            step.assign(value)
            if manager.save() is not None:
                saved.append(value)
        return saved

    step = sg.Variable(0, dtype="int32")
    checkpoint = sg.train.Checkpoint(step=step)
    manager = sg.train.CheckpointManager(
        checkpoint, tmp_path, None, step_counter=step, checkpoint_interval=3
    )
    assert manager.checkpoint_interval == 3
    assert run(step, manager, 8) == [3, 6]
    assert names(manager) == ["ckpt-3", "ckpt-6"]
    assert manager.save(check_interval=False) == str(tmp_path / "ckpt-7")

    manager.restore_or_initialize()
    assert run(step, manager, 12) == [10]
    assert manager.directory == str(tmp_path)


def cut(path: str) -> None:
    """Truncates the largest array file to half its size."""
    files = [file for file in Path(path, "step_state").rglob("*") if file.is_file()]
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_damaged_latest_is_an_error_and_skipped_on_request(tmp_path: Path) -> None:
    step, manager = make(tmp_path)
    for value in (1, 2, 3):
        step.assign(value)
        manager.save()
    for shard in Path(manager.checkpoints[-1]).glob("step_state/d/*"):
        shard.unlink()
    cut(manager.checkpoints[-2])
    with pytest.raises(
        sg.errors.DataLossError, match=r"(?s)ckpt-3.* is damaged.*skip_damaged=True"
    ):
        manager.restore_or_initialize()
    assert int(step) == 3
    assert manager.restore_or_initialize(skip_damaged=True) == manager.checkpoints[0]
    assert int(step) == 1
    cut(manager.checkpoints[0])
    with pytest.raises(sg.errors.DataLossError, match="ckpt-1 is damaged"):
        manager.restore_or_initialize(skip_damaged=True)


def test_a_number_that_is_taken_is_replaced_by_a_whole_one(tmp_path: Path, monkeypatch) -> None:
    step, manager = make(tmp_path)
    step.assign(1)
    path = manager.save(5)

    replace = manager_module._replace

    def killed(folder: Path) -> None:
        if folder.with_name(folder.name + ".new").exists():
            raise KeyboardInterrupt
        replace(folder)

    step.assign(2)
    with monkeypatch.context() as patch:  # as if killed when the new one is written
        patch.setattr(manager_module, "_replace", killed)
        with pytest.raises(KeyboardInterrupt):
            manager.save(5)
    manager.checkpoint.restore(path)
    assert int(step) == 1

    assert manager.checkpoints == [path + ".new"]
    assert manager.restore_or_initialize() == path + ".new"
    assert int(step) == 2
    step.assign(3)
    assert manager.save(5) == path
    manager.checkpoint.restore(path)
    assert int(step) == 3
    assert os.listdir(tmp_path) == ["ckpt-5"]


def test_failed_save_keeps_earlier_checkpoints(tmp_path: Path, monkeypatch) -> None:
    step, manager = make(tmp_path, max_to_keep=1)
    step.assign(4)
    first = manager.save()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    ocp = pytest.importorskip("orbax.checkpoint.experimental.v1")
    with monkeypatch.context() as patch:
        patch.setattr(ocp, "save_checkpointables", full)
        with pytest.raises(OSError, match="No space left on device"):
            manager.save()
        with pytest.raises(OSError, match="No space left on device"):
            manager.save(7)
    assert int(manager.checkpoint.save_counter) == 1  # a save that failed does not count
    assert manager.checkpoints == [first]
    step.assign(0)
    manager.restore_or_initialize()
    np.testing.assert_array_equal(step.value, 4)
    assert names(manager) == ["ckpt-1"]
    manager.save()
    assert names(manager) == ["ckpt-2"]


def test_folder_that_another_process_names_is_there_after_a_save(tmp_path, monkeypatch) -> None:
    """TensorFlow's guides delete this folder afterwards; nothing is written to it."""
    checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
    monkeypatch.setattr("stratagem.checkpoint.manager.is_first", lambda: False)
    monkeypatch.setattr(checkpoint, "save_as", lambda path, options, place: path)
    folder = tmp_path / "workertemp_1" / "ckpt"
    sg.train.CheckpointManager(checkpoint, folder, max_to_keep=1).save()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_to_keep": 0}, "CheckpointManager received max_to_keep=0"),
        ({"max_to_keep": -1}, "CheckpointManager received max_to_keep=-1"),
        ({"checkpoint_interval": 3}, "was passed without a step_counter"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(tmp_path, **options)


@dataclasses.dataclass
class Unregistered:
    w: Any


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": ("text",)}, r"state\['a'\]\[0\]='text' cannot be saved"),
        ({"a": Unregistered(np.zeros(2))}, r"state\['a'\]=.*Unregistered"),
        ([keras.layers.Dense(1), np.zeros(2)], r"state\[0\]=<Dense"),
        ({"a": 2**80}, r"state\['a'\]=1208925819614629174706176"),
    ],
)
def test_other_pytrees_are_rejected(tree, words) -> None:
    with pytest.raises(TypeError, match=rf"{words}(?s:.)*Fix: .*register_dataclass"):
        sg.train.Checkpoint(state=tree)


# Pytrees are saved by path and restored with their types and shardings.


class Moments(NamedTuple):
    mean: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    moments: Moments
    note: str = dataclasses.field(default="", metadata={"static": True})


def state(fill: float = 0.0, *, key: int = 0) -> State:
    """Every container and every kind of leaf."""
    params = {
        "dense/a": {"w": jnp.full((2, 3), fill), "b": jnp.full((3,), fill, "bfloat16")},
        "list": [jnp.asarray(int(fill)), np.full(2, fill), (np.float32(fill), None)],
        "numbers": {"int": int(fill), "float": fill / 4, "bool": bool(fill), "complex": fill * 1j},
        "keys": (jax.random.key(key), jax.random.split(jax.random.key(key, impl="rbg"), 2)),
        "none": jnp.zeros((0, 4)),
        3: jnp.asarray([fill > 0]),
    }
    params = {str(name): value for name, value in params.items()}
    return State(params, Moments(jnp.full((2,), fill, "int8"), jnp.asarray(fill)), "static")


def as_plain(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(one: Any, two: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert type(ours) is type(theirs)
        if isinstance(ours, jax.Array):
            assert (ours.dtype, ours.sharding, ours.committed) == (
                theirs.dtype,
                theirs.sharding,
                theirs.committed,
            )
        np.testing.assert_array_equal(as_plain(ours), as_plain(theirs))


@pytest.mark.slow
def test_restored_tree_is_the_attribute_and_has_the_types_of_the_old_one(tmp_path: Path) -> None:
    saved, other = state(5.0, key=1), state()
    path = sg.train.Checkpoint(state=saved, step=sg.Variable(3)).save(tmp_path / "ckpt")
    checkpoint = sg.train.Checkpoint(state=other, step=sg.Variable(0))
    checkpoint.restore(path).assert_consumed()
    assert_same(checkpoint.state, saved)
    assert_same(other, state())  # is not changed
    assert checkpoint.state.note == "static"
    checkpoint.state = state(6.0)
    path = checkpoint.save(tmp_path / "ckpt")
    again = sg.train.Checkpoint()
    again.restore(path).expect_partial()
    again.state = state()
    assert_same(again.state, state(6.0))


def test_shapes_and_dtypes_are_enough_to_restore(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(4)}
    path = sg.train.Checkpoint(tree).save(tmp_path / "ckpt")
    abstract = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf, tree))
    checkpoint = sg.train.Checkpoint(abstract)
    with pytest.raises(ValueError, match=r"root\['key'\] is ShapeDtypeStruct.*no value to save"):
        checkpoint.save(tmp_path / "other")
    checkpoint.restore(path)
    assert_same(checkpoint.root, tree)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_arrays_of_a_strategy_keep_their_shardings(count: int, tmp_path: Path) -> None:
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(count)])

    def make(scale: float) -> dict[str, Any]:
        def own() -> Any:
            replica = sg.get_replica_context().replica_id_in_sync_group
            return (jnp.asarray(replica, "float32") + 1.0) * jnp.full((3,), scale)

        per_replica = strategy.run(own)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        return {
            "parts": per_replica,
            "sum": strategy.extended.reduce_to("SUM", per_replica, per_replica),
            "sharded": jax.device_put(jnp.arange(4.0) * scale, sharding),
        }

    saved = make(2.0)
    path = sg.train.Checkpoint(tree=saved).save(tmp_path / "ckpt")
    checkpoint = sg.train.Checkpoint(tree=make(0.0))
    checkpoint.restore(path).assert_consumed()
    restored = checkpoint.tree
    assert_same(restored, saved)
    parts = [np.asarray(part).tolist() for part in strategy.local_results(restored["parts"])]
    assert parts == [[2.0 * (index + 1)] * 3 for index in range(count)]
    np.testing.assert_array_equal(restored["sharded"], [0.0, 2.0, 4.0, 6.0])
    doubled = strategy.run(lambda part: part * 2.0, args=(restored["parts"],))
    assert np.asarray(strategy.local_results(doubled)[0]).tolist() == [4.0] * 3
    three = sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    other = saved | {"parts": three.run(lambda: jnp.zeros(3))}
    words = {
        1: "Not in the checkpoint: parts/0. Only there: parts",  # one replica's is a plain array
        2: r"tree\['parts'\].* is float32\[3, 3\] here, NamedSharding.* but float32\[2, 3\]",
    }
    with pytest.raises(ValueError, match=words[count]):
        sg.train.Checkpoint(tree=other).restore(path)


@pytest.mark.slow
def test_other_shapes_and_dtypes_name_the_path_and_both_shardings(tmp_path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {
        "a": [jax.device_put(jnp.zeros(4), sharded)],
        "b": np.zeros(2, "int32"),
        "k": jax.random.key(0),
    }
    path = sg.train.Checkpoint(state=tree).save(tmp_path / "ckpt")
    rbg = jax.random.key(0, impl="rbg")
    for other, words in (
        (
            tree | {"a": [jnp.zeros(3)]},
            r"state\['a'\]\[0\] is float32\[3\] here, SingleDeviceSharding.* but "
            r"float32\[4\] in .*ckpt-1, NamedSharding\(.*'x'",
        ),
        (
            tree | {"b": np.zeros(2)},
            r"state\['b'\] is float64\[2\] here, on the host, but int32\[2\] in",
        ),
        (tree | {"k": rbg}, r"state\['k'\] is key<rbg>\[\] here, .*, but key<fry>\[\] in"),
        ({"a": tree["a"], "b": tree["b"], "c": rbg}, "Not in the checkpoint: c. Only there: k"),
        (tree | {"c": 1}, "Not in the checkpoint: c. Only there: none"),
    ):
        checkpoint = sg.train.Checkpoint(state=other)
        with pytest.raises(ValueError, match=words):
            checkpoint.restore(path)
        assert checkpoint.state is other
    with pytest.raises(ValueError, match="pytree like the saved one and convert it"):
        sg.train.Checkpoint(state=tree | {"b": np.zeros(3, "int32")}).restore(path)


def test_memory_keeps_pytrees_too(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(state=state(5.0, key=1))
    sg.checkpoint.MemoryBackup(checkpoint, tmp_path).save(1)
    checkpoint.state = state()
    assert sg.checkpoint.MemoryBackup(checkpoint, tmp_path).restore() == 1
    assert_same(checkpoint.state, state(5.0, key=1))
