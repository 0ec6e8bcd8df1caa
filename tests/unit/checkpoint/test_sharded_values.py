"""Shards to save: which variables have them, and whether processes write them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint import latest as group_calls
from stratagem.checkpoint import restoration as sharded_values
from stratagem.checkpoint import saving
from stratagem.checkpoint.latest import is_first, read_in_time, run_on_all, run_on_first
from stratagem.checkpoint.objects import Part, part_of
from stratagem.checkpoint.restoration import (
    begin_sharded_write,
    bytes_to_write,
    own_shards,
    sharded_items_of,
    sharded_value_of,
)
from stratagem.checkpoint.restoring import (
    on_host,
    whole_values_of,
)
from stratagem.checkpoint.saving import load_manifest
from stratagem.checkpoint.storage import files
from stratagem.checkpoint.storage.shards import ShardedArray
from stratagem.errors import DataLossError, DeadlineExceededError
from stratagem.observe import writer
from stratagem.observe.writer import EventWriter
from tests.unit.checkpoint.groups import Reader
from tests.unit.observe.test_wait_clock import ticking


class Group:
    """A group of two, with an answer of the other that the test sets."""

    def __init__(self, process_id: int, result: Any = None, error: Any = None) -> None:
        self.process_id = process_id
        self.identity = SimpleNamespace(labels=("worker 0 (a:1)", "worker 1 (b:1)"))
        self.other = {"result": result, "error": error}
        self.sent: list[Any] = []

    def exchange(self, name: str, value: Any, *, timeout_s: float, setting: str) -> list[Any]:
        assert timeout_s > 0
        assert setting == "STRATAGEM_SAVE_TIMEOUT_S"
        self.sent.append((name, value))
        return [value, self.other] if self.process_id == 0 else [self.other, value]


def enter(monkeypatch: pytest.MonkeyPatch, group: Group | None) -> None:
    monkeypatch.setattr(group_calls, "current_group", lambda: group)


def fail() -> None:
    raise OSError("disk full")


def test_alone_everything_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, None)
    assert (run_on_first("here", lambda: 4), run_on_all("here", lambda: 5)) == (4, 5)
    assert is_first()
    with pytest.raises(OSError, match="disk full"):
        run_on_all("here", fail)


@pytest.mark.parametrize("process_id", [0, 1])
def test_first_works_and_decides_and_all_keep_what_all_did(process_id: int, monkeypatch) -> None:
    group = Group(process_id, "its view")
    enter(monkeypatch, group)
    done: list[int] = []
    found = run_on_first("here", lambda: done.append(1) or "mine")
    assert (found, done) == (("mine", [1]) if process_id == 0 else ("its view", []))
    assert is_first() == (process_id == 0)
    result = object()  # nothing that could be sent
    assert run_on_all("here", lambda: result) is result
    assert group.sent[-1] == ("here", {"result": None, "error": None})


def test_local_error_is_sent_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(0)
    enter(monkeypatch, group)
    with pytest.raises(OSError, match="disk full"):
        run_on_first("here", fail)
    assert group.sent == [("here", {"result": None, "error": ["OSError", "disk full"]})]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("OSError", OSError), ("DataLossError", DataLossError), ("KeyboardError", RuntimeError)],
)
def test_error_of_another_names_it_and_keeps_its_class(
    kind: str, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, Group(1, error=[kind, "disk full"]))
    with pytest.raises(
        expected, match=rf"worker 0 \(a:1\) failed in here: {kind}: disk full"
    ) as raised:
        run_on_first("here", lambda: None)
    assert type(raised.value) is expected


# A file system that hangs while others wait.


@pytest.fixture
def hung(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A checkpoint whose metadata can be opened, but not read, as on a lost NFS server."""
    folder = tmp_path / "hung-1"
    folder.mkdir()
    os.mkfifo(folder / "_CHECKPOINT_METADATA")
    monkeypatch.setattr(files, "is_whole", lambda folder: True)
    monkeypatch.setenv("STRATAGEM_SAVE_TIMEOUT_S", "0.2")
    yield folder
    with open(folder / "_CHECKPOINT_METADATA", "wb"):
        pass  # ends the thread


def test_reading_that_hangs_ends_with_the_limit_and_names_the_folder(hung, monkeypatch) -> None:
    group = Group(0)
    enter(monkeypatch, group)
    with pytest.raises(DeadlineExceededError, match=f"has not read {hung} within 0.2 s") as raised:
        run_on_first("here", lambda: load_manifest(hung))
    assert "SG508" in str(raised.value)
    (_, sent), *_ = group.sent
    assert sent["error"] == ["DeadlineExceededError", str(raised.value)]


def test_reading_in_time_returns_or_raises_what_it_does(tmp_path, monkeypatch) -> None:
    here = threading.current_thread()
    assert read_in_time(tmp_path, threading.current_thread) is here
    enter(monkeypatch, Group(0))
    assert read_in_time(tmp_path, threading.current_thread) is not here
    assert read_in_time(tmp_path, lambda: None) is None
    with pytest.raises(OSError, match="disk full"):
        read_in_time(tmp_path, fail)


# Shards to save: which variables have them, and whether processes write them.


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
    devices = np.array(jax.devices()[:4]).reshape(2, 2)  # copies are saved by one
    mesh = jax.sharding.Mesh(devices, ("replica", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
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
    (tmp_path / "file").touch()  # values are gathered where no folder can be created
    assert _begin(tmp_path / "file" / "ckpt-1") is None


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


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("process_id", [0, 1])
def test_processes_write_shards_to_a_folder_of_process_0_that_all_see(
    process_id: int, sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path if sees else tmp_path / "missing"
    group = Agreeing(process_id, folder, other_sees=sees or process_id == 1)
    for module in (group_calls, sharded_values):
        monkeypatch.setattr(module, "current_group", lambda: group)
    begun = _begin(tmp_path / "ckpt-1")
    if not sees:
        assert (begun, list(tmp_path.iterdir())) == (None, [])
    elif process_id == 0:
        assert (begun.num_processes, list(tmp_path.iterdir())) == (2, [begun.folder])
    else:
        assert begun.folder == folder


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


@pytest.mark.parametrize("is_async", [False, True])
def test_save_and_restore_events_carry_the_step(
    is_async: bool, events: EventWriter, tmp_path: Path
) -> None:
    checkpoint = sg.train.Checkpoint(value=sg.Variable(1.0))
    events.step(7)
    path = checkpoint.save(tmp_path / "ckpt", sg.train.CheckpointOptions(enable_async=is_async))
    checkpoint.sync()
    events.step(9)
    checkpoint.restore(path)
    memory = sg.checkpoint.MemoryBackup(checkpoint, tmp_path / "m")
    memory.save(1)
    memory.restore()
    begun, ended, restored, again = recorded(tmp_path, "save_started", "save_ended", "restored")
    assert (begun["step"], ended["step"], restored["step"]) == (7, 7, 7)
    assert begun["is_asynchronous"] == ended["is_asynchronous"] == is_async
    assert (ended["failed"], restored["source"], again["source"]) == (None, path, "memory")
    assert 0 < ended["stall_s"] <= ended["duration_s"]
    assert (ended["stall_s"] < ended["duration_s"]) == is_async
    assert events.last_step == 7


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


def test_newest_is_by_time_and_not_by_number(checkpoint, tmp_path: Path) -> None:
    manager = sg.train.CheckpointManager(checkpoint, tmp_path, None)
    for number in (9, 10, 2):
        path = manager.save(checkpoint_number=number)
        assert path is not None
        assert sg.train.latest_checkpoint(tmp_path) == path
    assert os.path.basename(path) == "ckpt-2"


def test_checkpoint_that_was_not_written_to_its_end_does_not_count(checkpoint, tmp_path) -> None:
    (tmp_path / "notes-1").mkdir()
    for folder in (tmp_path, tmp_path / "none"):
        assert sg.train.latest_checkpoint(folder) is None
    first = checkpoint.save(tmp_path / "model.ckpt")  # as an Estimator names them
    second = Path(checkpoint.save(tmp_path / "model.ckpt"))
    (second / "commit_success.txt").unlink()
    assert sg.train.latest_checkpoint(tmp_path) == first


def test_iterator_yields_each_newest_once_and_ends_by_its_function(checkpoint, tmp_path) -> None:
    asked: list[int] = []

    def save_or_end() -> bool:
        asked.append(len(asked))
        if len(asked) > 2:
            return True
        for _ in asked:  # of several new ones, the newest is given
            checkpoint.save(tmp_path / "ckpt")
        return False

    found = sg.train.checkpoints_iterator(tmp_path / ".", timeout=0, timeout_fn=save_or_end)
    assert [os.path.basename(path) for path in found] == ["ckpt-1", "ckpt-3"]


# Objects that a checkpoint refuses: other types, no variables, states that are no JSON.


@pytest.mark.parametrize(
    ("objects", "error", "words"),
    [
        ({"model": {"a": "text"}}, TypeError, r"model\['a'\]=.* cannot be saved"),
        ({"model": {"a": np.zeros(2), "b": keras.layers.Dense(1)}}, TypeError, "a dict from names"),
        ({"step": 3}, TypeError, "cannot be saved(?s:.)*got int"),
        ({"save_counter": keras.Variable(1)}, ValueError, "an object named save_counter"),
        ({"model": keras.Sequential([keras.layers.Dense(2)])}, ValueError, "has no variables yet"),
        ({"reader": Reader(b"bytes")}, TypeError, "a value that JSON cannot store"),
    ],
)
def test_other_objects_are_refused(objects, error, words, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        sg.train.Checkpoint(**objects).save(tmp_path / "ckpt")
    assert not list(tmp_path.iterdir())


def test_object_of_another_kind_changes_nothing(tmp_path: Path) -> None:
    step, reader = sg.Variable(1, dtype="int32"), Reader(5)
    path = sg.train.Checkpoint(step=step, thing=sg.Variable(2.0)).save(tmp_path / "ckpt")
    step.assign(9)
    with pytest.raises(ValueError, match="thing is a state here but was saved in"):
        sg.train.Checkpoint(step=step, thing=reader).restore(path)
    assert (int(step), reader.state) == (9, 5)
