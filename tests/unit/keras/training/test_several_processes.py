"""What `fit` changes in its arguments where several processes call it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.group.current import Identity
from stratagem.input import batches
from stratagem.input.distributed import DistributedDataset
from stratagem.keras.training import datasets, several_processes
from stratagem.keras.training.datasets import DatasetAdapter
from stratagem.keras.training.several_processes import (
    check_callbacks,
    data_lengths,
    data_rows,
    require_equal_lengths,
    require_equal_rows,
    settle_call,
    written_by_first,
)
from stratagem.keras.variables.variable import announce_gather
from stratagem.variables.registry import VariableKind
from tests.parity.comparison import differences, evaluated, fitted, mirrored, regression
from tests.row_selections import count_selections
from tests.unit.keras.replicas import dense_model, two


class Member:
    """A group in which all hand in the same."""

    def __init__(self, process_id: int) -> None:
        self.process_id = process_id
        self.identity = Identity(process_id, ("worker 0", "worker 1"), "localhost", 0)

    def exchange(self, name: str, value: Any) -> list[Any]:
        return [value, value]


@pytest.mark.parametrize("process_id", [0, 1])
def test_writers_work_on_process_0_and_folders_are_there_before(
    process_id, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(several_processes, "current_group", lambda: Member(process_id))
    monkeypatch.setattr(several_processes, "agree_on_random_state", lambda: None)
    writer = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    savers = [
        keras.callbacks.ModelCheckpoint(str(tmp_path / "a" / "b" / "model.keras")),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "c" / "of-{epoch}" / "model.keras")),
        keras.callbacks.ModelCheckpoint("model.keras"),
    ]
    arguments = {"verbose": 2, "callbacks": [writer, *savers]}

    assert settle_call(arguments, wants_logs=True)

    # Keras makes the folder when it saves, and fails where another process does at that moment.
    assert (tmp_path / "a" / "b").is_dir()
    assert (tmp_path / "c").is_dir()
    is_first = process_id == 0
    assert arguments["verbose"] == (2 if is_first else 0)
    assert arguments["callbacks"] == ([writer, *savers] if is_first else savers)
    for given, left in ((writer, writer if is_first else []), (None, None)):
        arguments = {"callbacks": given}
        assert not settle_call(arguments, wants_logs=False)
        assert arguments.get("callbacks") == left


class Scripted(Member):
    """A group whose process 0 sends given messages, and that records what is sent."""

    def __init__(self, process_id: int, messages: list[Any]) -> None:
        super().__init__(process_id)
        self.messages = messages
        self.sent: list[Any] = []

    def exchange(self, name: str, value: Any) -> list[Any]:
        assert name.startswith(("model.save", "keras.saving.save_"))
        self.sent.append(value)
        return [value if self.process_id == 0 else self.messages.pop(0), None]


class Gathered:
    def __init__(self) -> None:
        self.count = 0

    def gathered(self) -> None:
        self.count += 1


def _message(gather: int | None, error: str | None = None) -> dict[str, Any]:
    return {"gather": gather, "error": error}


@pytest.mark.parametrize("fails", [False, True])
def test_process_0_asks_for_each_value_it_reads(fails: bool) -> None:
    variables: Any = {3: Gathered(), 4: Gathered()}
    group: Any = Scripted(0, [])

    def write() -> str:
        announce_gather(variables[4])
        announce_gather(variables[3])
        if fails:
            raise OSError("disk is full")
        return "path"

    result, error, text = written_by_first("model.save", group, variables, write)
    expected = "OSError('disk is full')" if fails else None
    assert (result, text) == (None if fails else "path", expected)
    assert isinstance(error, OSError) is fails
    asked = [_message(4), _message(3)]
    assert group.sent == [*asked, _message(None, expected)]
    announce_gather(variables[3])
    assert len(group.sent) == 3  # the file is written


def test_other_processes_join_the_gathers() -> None:
    variables: Any = {3: Gathered(), 4: Gathered()}
    messages = [_message(4), _message(4), _message(None, "full")]
    group: Any = Scripted(1, messages)
    done = written_by_first("model.save", group, variables, pytest.fail)
    assert done == (None, None, "full")
    assert [one.count for one in variables.values()] == [0, 2]


class Preset(keras.Model):
    """Saves as a model of KerasHub does: other files, then weights by `save_weights`."""

    def save_to_preset(self, folder: Path) -> None:
        folder.mkdir()  # fails if two processes do
        (folder / "config.json").touch()
        self.save_weights(folder / "model.weights.h5")


def _preset(group: Any, monkeypatch: pytest.MonkeyPatch) -> Preset:
    topology = SimpleNamespace(spans_processes=True)
    variables = SimpleNamespace(live=list, has_unsettled=False, take_unsettled=list)
    strategy = SimpleNamespace(topology=topology, variables=variables)
    home = SimpleNamespace(strategy=strategy, kind=VariableKind.MIRRORED)
    monkeypatch.setattr(several_processes, "current_group", lambda: group)
    monkeypatch.setattr(several_processes, "home_of", lambda variable: home)
    inputs = keras.Input((1,))
    return Preset(inputs, keras.layers.Dense(1)(inputs))


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (lambda model, path: keras.saving.save_model(model=model, filepath=path), "model.keras"),
        (keras.models.save_model, "model.keras"),
        (keras.saving.save_weights, "model.weights.h5"),
        (lambda model, path: model.save_to_preset(path), "preset"),
    ],
    ids=["saving", "models", "weights", "preset"],
)
@pytest.mark.parametrize("process_id", [0, 1])
def test_process_0_writes_the_file_of_a_function(
    save: Any, name: str, process_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Scripted(process_id, [_message(None)])
    save(_preset(group, monkeypatch), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ([name] if process_id == 0 else [])
    assert group.sent == [_message(None) if process_id == 0 else None]  # one exchange, at the end
    group = Scripted(1, [_message(None, "OSError: full")])
    with pytest.raises(RuntimeError, match=r"failed in (keras\.saving|model)\.save_\w+: OSError"):
        save(_preset(group, monkeypatch), tmp_path / name)


def test_errors_of_process_0_are_raised_on_all(tmp_path, monkeypatch) -> None:
    group = Scripted(0, [])
    with pytest.raises(FileNotFoundError):
        _preset(group, monkeypatch).save_to_preset(tmp_path / "missing" / "preset")
    assert "FileNotFoundError" in group.sent[-1]["error"]
    group = Scripted(1, [_message(None, group.sent[-1]["error"])])
    with pytest.raises(RuntimeError, match=r"worker 0 failed in model\.save_to_preset: File"):
        _preset(group, monkeypatch).save_to_preset(tmp_path / "preset")


# Lengths that processes compare at the start of `fit`.

LABELS = ("worker 0 (a:1)", "worker 1 (b:1)")


class _OfUnknownLength:
    def __len__(self) -> int:
        raise TypeError("unknown")


def _batches() -> DatasetAdapter:
    strategy = sg.MirroredStrategy(["cpu:0"])
    return DatasetAdapter(strategy.distribute_dataset([np.ones((2, 3))] * 5))


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (np.ones((7, 2)), 7),
        ({"a": np.ones((6,)), "b": np.ones((6, 1))}, 6),
        (([np.ones((5, 2))], np.ones((5,))), 5),
        ([1.0, 2.0, 3.0], 3),
        (_batches, 5),
        (_OfUnknownLength(), None),
        (iter([]), None),
        (np.float32(1.0), None),
        (None, None),
    ],
)
def test_length_is_that_of_arrays_or_of_batches(data: Any, length: int | None) -> None:
    data = data() if callable(data) else data
    known = {} if length is None else {"the length of x": length}
    found = data_lengths({"x": data, "epochs": 3, "steps_per_epoch": None})
    assert found == {"epochs": 3} | known
    require_equal_lengths([found | {"steps": 2}, {"epochs": 3}], LABELS)
    words = r"epochs: 3 on worker 0 \(a:1\), 80 on worker 1 \(b:1\)\.(?s:.)*AutoShardPolicy"
    with pytest.raises(ValueError, match=words):
        require_equal_lengths([found, {"epochs": 80}], LABELS)


_NUMBERS = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
# Two shards of each.
_SHARDS: dict[str, tuple[Any, Any]] = {
    "float32": (_NUMBERS[:20], _NUMBERS[20:]),
    "bfloat16": (jnp.bfloat16(_NUMBERS[:20]), jnp.bfloat16(_NUMBERS[20:])),
    "jax": (jnp.asarray(_NUMBERS[:20]), jnp.asarray(_NUMBERS[20:])),
    "complex": (_NUMBERS[:20] * 1j, _NUMBERS[20:] * 1j),
    "classes": (np.arange(20), np.arange(20)[::-1].copy()),
    "one-hot": (np.eye(20)[:10], np.eye(20)[10:]),
    "bytes": (np.frombuffer(b"abcd", "S1"), np.frombuffer(b"efgh", "S1")),
    "text": (np.array(["a", "b"]), np.array(["c", "d"])),
    "with nan": (np.where(_NUMBERS > 0, np.nan, _NUMBERS)[:20], _NUMBERS[20:]),
    "one row": (np.full((1, 2), 3.0), np.full((1, 2), 4.0)),
    "wide rows": (np.zeros((2, 500_000)), np.ones((2, 500_000))),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("x", kind) for kind in _SHARDS),
        *((name, "float32") for name in ("y", "sample_weight", "validation_data")),
    ],
)
def test_shards_of_equal_length_are_refused_by_name_and_row(name: str, kind: str) -> None:
    mine, theirs = _SHARDS[kind]
    # The last bits of what each process has computed may differ.
    nearly = mine * np.float32(1 + 1e-6) if kind == "float32" else mine
    rows = [data_rows({name: {"a": part}}) for part in (mine, nearly, theirs)]
    require_equal_rows(rows[:2], LABELS)
    words = rf"in the values of {name}\['a'\]: row \d+ is another on worker 2 than on worker 0"
    with pytest.raises(ValueError, match=rf"{words}\.(?s:.)*distribute_datasets_from_function"):
        require_equal_rows(rows, ["worker 0", "worker 1", "worker 2"])


_OTHERS: dict[str, Any] = {
    "none": None,
    "iterator": iter([]),
    "list": [1.0, 2.0],
    "number": np.float32(1.0),
    "no rows": np.zeros((0, 3)),
    "objects": np.array([object(), None], object),
    "dates": np.array(["2024-01-01"], "datetime64[D]"),
    "unknown length": _OfUnknownLength(),
    "function": lambda: iter([]),
}


@pytest.mark.parametrize("data", _OTHERS.values(), ids=_OTHERS)
def test_other_data_is_not_looked_at(data: Any) -> None:
    assert data_rows({"x": data}) == {}


@pytest.mark.parametrize("policy", [sg.AutoShardPolicy.AUTO, sg.AutoShardPolicy.OFF])
def test_arrays_of_a_dataset_are_looked_at_unless_they_are_of_one_process(policy) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    context = sg.InputContext(num_input_pipelines=2, num_replicas_in_sync=2)
    dataset = DistributedDataset(
        strategy,
        sg.input.Dataset((_NUMBERS, _NUMBERS[:, 0]), batch_size=4).as_source(),
        is_global=True,
        options=sg.InputOptions(auto_shard_policy=policy),
        context=context,
    )
    names = ["x[0]", "x[1]"] if policy is sg.AutoShardPolicy.AUTO else []
    assert list(data_rows({"x": DatasetAdapter(dataset)})) == names
    own = strategy.distribute_datasets_from_function(lambda _: [_NUMBERS])
    assert data_rows({"x": DatasetAdapter(own)}) == {}


# Arrays on an accelerator as data of `fit` and its kin: what Keras makes of them on the host.

_X, _Y = regression(43)
_CLASSES = (np.median(_Y) < _Y).astype("float32")
_WEIGHTS = np.linspace(0.2, 2.0, 43, dtype="float32")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Takes all arrays of JAX for arrays on an accelerator; the calls that select rows."""
    for module in (batches, datasets):
        monkeypatch.setattr(module, "is_on_accelerator", lambda one: isinstance(one, jax.Array))
    return count_selections(monkeypatch)


def _model(strategy: sg.Strategy, steps: int, *, is_unbuilt: bool = False, **compiled: Any) -> Any:
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([dense] if is_unbuilt else [keras.Input((3,)), dense])
        options = {"weighted_metrics": ["mae"], "steps_per_execution": steps} | compiled
        model.compile("sgd", "mse", **options)
    return model


def _job(model: Any, as_data: Callable[[Any], Any], **arguments: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(7)
    if "sample_weight" in arguments:
        arguments["sample_weight"] = as_data(arguments["sample_weight"])
    x, y = as_data(_X), as_data(_CLASSES)
    results = fitted(model, x, y, batch_size=5, **arguments) | evaluated(model, x, y, batch_size=5)
    results["predict"] = model.predict(x, batch_size=5, verbose=0)
    return {key: np.asarray(value) for key, value in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_replicas", "steps", "arguments"),
    [
        (1, 1, {"shuffle": False}),
        (1, 4, {"shuffle": "batch", "class_weight": {0: 1.0, 1: 3.0}}),
        (3, 1, {"shuffle": True, "sample_weight": _WEIGHTS}),
        (3, 4, {"shuffle": False, "validation_split": 0.3}),
        (1, 2, {"shuffle": True, "steps_per_epoch": 4}),
        (2, 1, {"shuffle": False, "run_eagerly": True}),
        (2, 1, {"shuffle": False, "is_unbuilt": True}),
    ],
)
def test_arrays_on_a_device_train_as_those_on_the_host(
    num_replicas: int, steps: int, arguments: dict[str, Any], programs: list[Any]
) -> None:
    kind = {one: arguments[one] for one in ("run_eagerly", "is_unbuilt") if one in arguments}
    arguments = {one: value for one, value in arguments.items() if one not in kind}
    expected = _job(_model(mirrored(num_replicas), steps, **kind), np.asarray, **arguments)
    assert programs == []
    actual = _job(_model(mirrored(num_replicas), steps, **kind), jnp.asarray, **arguments)
    assert programs or "run_eagerly" in kind
    assert differences(actual, expected) == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_group_of_steps_is_selected_by_one_program(shuffle: bool, programs: list[Any]) -> None:
    model = _model(mirrored(1), 10)
    x, y = jnp.ones((100, 3)), jnp.ones((100, 1))
    model.fit(x, y, batch_size=2, shuffle=shuffle, verbose=0)
    of_groups = [call["shape"] for call in programs if len(call["shape"]) > 1]
    assert of_groups == [(10, 2)] * 5
    assert len(programs) == 5 + 2  # Keras reads one batch before it trains.


# Callbacks of Keras's that a strategy refuses, and those that it lets through.


def _bare(name: str) -> Any:
    class_ = getattr(keras.callbacks, name, None)
    if class_ is None:
        pytest.skip(f"this Keras has no {name}")
    return object.__new__(class_)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("BackupAndRestore", r"use sg\.BackupAndRestore"),
        ("OrbaxCheckpoint", r"use sg\.BackupAndRestore"),
        ("TensorBoard", r"use sg\.TensorBoard"),
    ],
)
def test_several_processes_refuse_what_each_would_write(name: str, instead: str) -> None:
    with pytest.raises(NotImplementedError, match=instead):
        check_callbacks("fit", [keras.callbacks.History(), _bare(name)], spans_processes=True)
    refused = {"BackupAndRestore", "OrbaxCheckpoint", "TensorBoard", "CallbackList"}
    names = {name for name in dir(keras.callbacks) if name[0].isupper()} - refused
    check_callbacks("fit", [_bare(name) for name in sorted(names)], spans_processes=True)


def test_tensorboard_of_keras_needs_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = regression(8)
    model = dense_model(two)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"use sg\.TensorBoard, which works without TensorFlow"):
        model.fit(x, y, verbose=0, callbacks=_bare("TensorBoard"))
    assert int(model.optimizer.iterations) == 0


def test_backups_of_keras_are_written_in_one_process(tmp_path: Path) -> None:
    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(tmp_path / "written", delete_checkpoint=False)

    x, y = regression(8)
    model = dense_model(two)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[backup()])
    assert list(tmp_path.glob("written*"))
    before = np.array(model.layers[0].kernel.value)
    model.layers[0].kernel.assign(before * 0)
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=[backup()])
    np.testing.assert_array_equal(model.layers[0].kernel.value, before)  # nothing was left
