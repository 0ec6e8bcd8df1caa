"""Shards to save: which variables have them, and whether processes write them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint import latest as group_calls
from stratagem.checkpoint import restoration as sharded_values
from stratagem.checkpoint import saving
from stratagem.checkpoint.objects import Part, part_of
from stratagem.checkpoint.restoration import (
    begin_sharded_write,
    bytes_to_write,
    own_shards,
    sharded_items_of,
    sharded_value_of,
)
from stratagem.checkpoint.restoring import (
    assign_local_values,
    assign_values,
    gathered_components_of,
    has_components,
    local_arrays_of,
    local_values_of,
    on_host,
    whole_values_of,
)
from stratagem.checkpoint.storage.shards import ShardedArray
from stratagem.observe import writer
from stratagem.observe.writer import EventWriter
from stratagem.variables.registry import home_of
from tests.unit.checkpoint.groups import Reader
from tests.unit.checkpoint.test_group_calls import Group
from tests.unit.observe.test_wait_clock import ticking

LARGE = np.arange(2**19, dtype="float32").reshape(1024, 512)
ITEMS = {"state": "state_item"}


def variables(count: int = 4, **options: Any) -> dict[str, Any]:
    with sg.MirroredStrategy(jax.devices()[:count], **(options or {"shard_state": "all"})).scope():
        return {
            "large": sg.Variable(LARGE),
            "small": sg.Variable(LARGE[:64]),
            "sum": sg.Variable(LARGE, synchronization=sg.VariableSynchronization.ON_READ),
        }


def values_of(part: Part) -> dict[str, np.ndarray]:
    return {path: on_host(value) for path, value in whole_values_of(part, on_host).items()}


def components_of(part: Part) -> dict[str, np.ndarray]:
    gathered = gathered_components_of(part, on_host)
    return {path: on_host(value) for path, value in gathered.items()}


def test_large_values_with_shards_are_saved_as_such() -> None:
    parts = {"state": part_of("state", variables())}
    described = ShardedArray((1024, 512), "float32", (256, 512))
    expected = {"large": described, "small": None, "sum": None}
    assert sharded_items_of(parts, ITEMS) == {"state_item": expected}
    assert bytes_to_write(parts["state"]) == LARGE.nbytes * 2 + LARGE[:64].nbytes


def test_copies_are_not_shards() -> None:
    with sg.MirroredStrategy(jax.devices()[:2]).scope():
        copied = sg.Variable(LARGE)
    with sg.CentralStorageStrategy(jax.devices()[:2]).scope():
        central = sg.Variable(LARGE)
    for variable in (copied, central, sg.Variable(LARGE), variables(1)["large"]):
        assert sharded_value_of(variable) is None


def test_each_shard_is_saved_once_in_its_place() -> None:
    stored = sharded_value_of(variables()["large"])
    assert stored is not None
    shards = dict(own_shards("a/large", stored))
    assert list(shards) == [f"a.large/c/{index}/0" for index in range(4)]
    np.testing.assert_array_equal(np.concatenate(list(shards.values())), LARGE)


def test_copies_of_a_shard_are_saved_by_one_device() -> None:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(devices, ("replica", "model")), jax.sharding.PartitionSpec(None, "model")
    )
    shards = dict(own_shards("x", jax.device_put(LARGE, sharding)))
    assert list(shards) == ["x/c/0/0", "x/c/0/1"]
    np.testing.assert_array_equal(np.concatenate(list(shards.values()), axis=1), LARGE)


def _begin(folder: Path) -> Any:
    return begin_sharded_write(folder, {"state": part_of("state", variables())}, ITEMS)


def test_temporary_folder_replaces_one_that_a_killed_save_left(tmp_path: Path) -> None:
    other = tmp_path / "ckpt-11.orbax-checkpoint-tmp-1"
    other.mkdir()
    first, second = _begin(tmp_path / "ckpt-1"), _begin(tmp_path / "ckpt-1")
    assert sorted(tmp_path.iterdir()) == sorted([second.folder, other])
    assert (first.num_processes, second.num_processes) == (1, 1)
    assert begin_sharded_write(tmp_path / "ckpt-2", {}, {}) is None


class Agreeing(Group):
    """Two processes, of which the other sees a folder or does not."""

    num_processes = 2

    def __init__(self, process_id: int, folder: Path | None, *, other_sees: bool) -> None:
        super().__init__(process_id)
        self.folder, self.other_sees = folder, other_sees

    def exchange(self, name: str, value: Any, **limits: Any) -> list[Any]:
        is_flag = isinstance(value["result"], bool)
        answer = self.other_sees if is_flag else self.folder and str(self.folder)
        self.other = {"result": answer, "error": None}
        return super().exchange(name, value, **limits)


@pytest.mark.parametrize("other_sees", [True, False])
def test_processes_write_shards_to_a_folder_that_all_see(
    other_sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Agreeing(0, None, other_sees=other_sees)
    for module in (group_calls, sharded_values):
        monkeypatch.setattr(module, "current_group", lambda: group)
    begun = _begin(tmp_path / "ckpt-1")
    if other_sees:
        assert (begun.num_processes, list(tmp_path.iterdir())) == (2, [begun.folder])
    else:
        assert (begun, list(tmp_path.iterdir())) == (None, [])


@pytest.mark.parametrize("is_shared", [True, False])
def test_process_looks_for_the_folder_of_process_0(
    is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path if is_shared else tmp_path / "missing"
    group = Agreeing(1, folder, other_sees=True)
    for module in (group_calls, sharded_values):
        monkeypatch.setattr(module, "current_group", lambda: group)
    begun = _begin(tmp_path / "elsewhere" / "ckpt-1")
    assert (None if begun is None else begun.folder) == (folder if is_shared else None)


def test_values_are_gathered_where_no_folder_can_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert _begin(tmp_path / "file" / "ckpt-1") is None


# Values of variables on the host, and values assigned to variables, on two replicas.

PATHS = {"plain": "plain", "mirrored": "mirrored", "counts": "counts"}


@pytest.fixture
def variables_of_values() -> dict[str, Any]:
    """A plain variable, a mirrored one, and one with a component on each replica."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        mirrored = sg.Variable([1.0, 2.0])
        counts = sg.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
    mirrored_strategy = mirrored.distribute_strategy
    mirrored_strategy.run(
        lambda: counts.assign_add(
            keras.ops.cast(sg.get_replica_context().replica_id_in_sync_group, "float32") + 1
        )
    )
    return {"plain": keras.Variable(np.int32(3)), "mirrored": mirrored, "counts": counts}


def test_values_are_logical_and_components_are_of_each_replica(variables_of_values) -> None:
    part = part_of("model", variables_of_values)
    values = values_of(part)
    assert {name: value.tolist() for name, value in values.items()} == {
        "plain": 3,
        "mirrored": [1, 2],
        "counts": 3,
    }
    assert all(isinstance(value, np.ndarray) for value in values.values())
    assert [one for one in variables_of_values if has_components(variables_of_values[one])] == [
        "counts"
    ]
    assert {name: value.tolist() for name, value in components_of(part).items()} == {
        "counts": [1, 2]
    }


def test_value_is_in_the_dtype_of_the_variable_under_mixed_precision() -> None:
    class Layer(keras.layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.weight = self.add_weight(shape=(), initializer="ones")

        def call(self, inputs: Any) -> Any:
            self.seen = self.weight.value.dtype, values_of(part_of("w", self.weight))["value"].dtype
            return inputs

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        layer = Layer(dtype="mixed_float16")
        layer(np.ones((1, 1), np.float32))
    assert layer.seen == (np.float16, np.float32)


def test_local_values_come_back(variables_of_values) -> None:
    part = part_of("model", variables_of_values)
    saved = {
        name: value.copy() for name, value in local_values_of(part, local_arrays_of(part)).items()
    }
    assert saved["counts"].tolist() == [1, 2]
    for variable in variables_of_values.values():
        variable.assign(keras.ops.zeros_like(variable.value))
    assign_local_values(part, PATHS, saved)
    assert components_of(part)["counts"].tolist() == [1, 2]
    assert values_of(part)["mirrored"].tolist() == [1, 2]
    assert int(variables_of_values["plain"].value) == 3


def test_components_are_restored_if_they_fit_and_else_their_aggregate(variables_of_values) -> None:
    part = part_of("model", variables_of_values)
    values = {"plain": np.array(7), "mirrored": np.array([5.0, 6.0]), "counts": np.array(9.0)}
    assign_values(part, PATHS, dict(values), {"counts": np.array([4.0, 5.0])})
    assert components_of(part)["counts"].tolist() == [4, 5]
    assert values_of(part)["mirrored"].tolist() == [5, 6]
    assign_values(part, PATHS, values, {"counts": np.array([1.0, 2.0, 3.0])})
    assert not values  # their memory serves the next ones
    assert values_of(part)["counts"] == 9
    assert components_of(part)["counts"].sum() == 9


def test_value_assigned_while_a_step_is_traced_is_a_value_and_no_tracer(
    variables_of_values,
) -> None:
    own = {name: variables_of_values[name] for name in ("plain", "mirrored")}
    part = part_of("model", own)
    values = {"plain": np.array(7), "mirrored": np.array([5.0, 6.0])}

    def step(x: Any) -> Any:
        assign_values(part, {name: name for name in own}, dict(values), {})
        return x

    home_of(variables_of_values["mirrored"]).strategy.run(step, args=(1.0,))
    assert values_of(part)["plain"] == 7
    assert values_of(part)["mirrored"].tolist() == [5, 6]


# Goodput events of saves and restores.


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventWriter]:
    with EventWriter(tmp_path / "run", "worker", 0, num_processes=1, interval_s=0) as made:
        monkeypatch.setattr(saving, "current_events", lambda: made)
        monkeypatch.setattr(saving, "time", ticking())
        yield made


def recorded(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    (file,) = (folder / "run" / "events").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line["kind"] in kinds]


def test_save_and_restore_events_carry_the_step(events: EventWriter, tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(value=sg.Variable(1.0))
    events.step(7)
    path = checkpoint.save(tmp_path / "ckpt")
    events.step(9)
    checkpoint.restore(path)
    begun, ended, restored = recorded(tmp_path, "save_started", "save_ended", "restored")
    assert (begun["step"], ended["step"], restored["step"]) == (7, 7, 7)
    assert (begun["is_asynchronous"], ended["failed"], restored["source"]) == (False, None, path)
    assert 0 < ended["stall_s"] == ended["duration_s"]
    assert events.last_step == 7


def test_save_behind_training_stalls_for_less_than_it_takes(
    events: EventWriter, tmp_path: Path
) -> None:
    checkpoint = sg.train.Checkpoint(value=sg.Variable(1.0))
    events.step(3)
    checkpoint.save(tmp_path / "ckpt", sg.train.CheckpointOptions(enable_async=True))
    checkpoint.sync()
    begun, ended = recorded(tmp_path, "save_started", "save_ended")
    assert begun["is_asynchronous"]
    assert ended["is_asynchronous"]
    assert 0 < ended["stall_s"] < ended["duration_s"]


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_save_says_why(is_async: bool, events: EventWriter, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    checkpoint = sg.train.Checkpoint(value=sg.Variable(1.0))

    def save() -> None:
        options = sg.train.CheckpointOptions(enable_async=is_async)
        checkpoint.save(tmp_path / "file" / "ckpt", options)
        checkpoint.sync()

    with pytest.raises(OSError, match="could not be written"):
        save()
    (ended,) = recorded(tmp_path, "save_ended")
    assert "could not be written" in ended["failed"]


def test_in_memory_backup_is_recorded(events: EventWriter, tmp_path: Path) -> None:
    memory = sg.checkpoint.MemoryBackup(sg.train.Checkpoint(value=sg.Variable(1.0)), tmp_path / "m")
    events.step(5)
    memory.save(1)
    memory.restore()
    (restored,) = recorded(tmp_path, "restored")
    assert (restored["step"], restored["source"]) == (5, "memory")


def test_duration_of_a_backup_is_recorded_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = sg.checkpoint.MemoryBackup(sg.train.Checkpoint(value=sg.Variable(1.0)), tmp_path / "m")
    clock = ticking()
    monkeypatch.setattr(saving, "time", clock)
    monkeypatch.setattr(writer, "time", clock)
    with EventWriter(tmp_path / "run", "worker", 0, num_processes=1) as events:
        monkeypatch.setattr(saving, "current_events", lambda: events)
        events.step(5)
        memory.save(1)
        events.step(6)
    first, second = recorded(tmp_path, "step")
    assert first["keeping_s"] == 0
    assert 0 < second["keeping_s"] <= second["elapsed_s"]


# The newest checkpoint of a folder is the last complete one.


@pytest.fixture
def checkpoint() -> sg.train.Checkpoint:
    return sg.train.Checkpoint(step=sg.Variable(0))


def test_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    (tmp_path / "notes-1").mkdir()
    assert sg.train.latest_checkpoint(tmp_path) is None
    assert sg.train.latest_checkpoint(tmp_path / "none") is None


def test_newest_is_by_time_and_not_by_number(checkpoint, tmp_path: Path) -> None:
    manager = sg.train.CheckpointManager(checkpoint, tmp_path, None)
    for number in (9, 10, 2):
        path = manager.save(checkpoint_number=number)
        assert path is not None
        assert sg.train.latest_checkpoint(tmp_path) == path
    assert os.path.basename(path) == "ckpt-2"


def test_checkpoint_that_was_not_written_to_its_end_does_not_count(checkpoint, tmp_path) -> None:
    first = checkpoint.save(tmp_path / "ckpt")
    second = Path(checkpoint.save(tmp_path / "ckpt"))
    (second / "commit_success.txt").unlink()
    assert sg.train.latest_checkpoint(tmp_path) == first


def test_checkpoints_of_an_estimator_are_found(tmp_path: Path) -> None:
    saved = sg.train.CheckpointManager(
        sg.train.Checkpoint(step=sg.Variable(0)), tmp_path, None, checkpoint_name="model.ckpt"
    ).save(checkpoint_number=120)
    assert sg.train.latest_checkpoint(tmp_path) == saved


def test_iterator_yields_each_newest_once_and_ends_by_its_function(checkpoint, tmp_path) -> None:
    asked: list[int] = []

    def save_or_end() -> bool:
        asked.append(len(asked))
        if len(asked) > 2:
            return True
        checkpoint.save(tmp_path / "ckpt")
        return False

    found = sg.train.checkpoints_iterator(tmp_path / ".", timeout=0, timeout_fn=save_or_end)
    assert [os.path.basename(path) for path in found] == ["ckpt-1", "ckpt-2"]


def test_iterator_skips_superseded_checkpoints(checkpoint, tmp_path: Path) -> None:
    found = sg.train.checkpoints_iterator(tmp_path, timeout=0)
    checkpoint.save(tmp_path / "ckpt")
    assert os.path.basename(next(found)) == "ckpt-1"
    checkpoint.save(tmp_path / "ckpt")
    checkpoint.save(tmp_path / "ckpt")
    assert [os.path.basename(path) for path in found] == ["ckpt-3"]


# Objects that a checkpoint refuses: other types, no variables, states that are no JSON.


def test_other_things_in_a_dict_are_refused() -> None:
    for other in ("text", keras.Variable(1.0)):
        with pytest.raises(TypeError, match=r"model\['a'\]=.* cannot be saved") as caught:
            sg.train.Checkpoint(model={"a": other, "b": np.zeros(2)})
        assert "a dict from names to Keras variables" in str(caught.value)


def test_bad_objects() -> None:
    with pytest.raises(TypeError, match="cannot be saved") as caught:
        sg.train.Checkpoint(step=3)
    assert "got int" in str(caught.value)
    with pytest.raises(ValueError, match="Checkpoint received an object named save_counter"):
        sg.train.Checkpoint(save_counter=sg.Variable(1))


def test_object_without_variables_cannot_be_saved(tmp_path: Path) -> None:
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="has no variables yet"):
        sg.train.Checkpoint(model=unbuilt).save(tmp_path / "ckpt")
    assert not list(tmp_path.iterdir())


def test_state_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"reader\.get_state\(\) returned a value that JSON cannot store"
    ):
        sg.train.Checkpoint(reader=Reader(b"bytes")).save(tmp_path / "ckpt")
    assert not list(tmp_path.iterdir())


def test_object_of_another_kind_changes_nothing(tmp_path: Path) -> None:
    step, reader = sg.Variable(1, dtype="int32"), Reader(5)
    path = sg.train.Checkpoint(step=step, thing=sg.Variable(2.0)).save(tmp_path / "ckpt")
    step.assign(9)
    with pytest.raises(ValueError, match="thing is a state here but was saved in"):
        sg.train.Checkpoint(step=step, thing=reader).restore(path)
    assert (int(step), reader.state) == (9, 5)
