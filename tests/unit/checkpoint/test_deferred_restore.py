"""Variables created after a restore start with the saved values."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.checkpoint import restoration
from stratagem.checkpoint.restoration import SavedValue, ShardedRestore, broadcast_from_first
from stratagem.errors import DataLossError

ROWS = np.random.default_rng(0).random((8, 4)).astype("float32")
TARGETS = ROWS.sum(axis=1, keepdims=True)
STRATEGIES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "one": lambda: sg.OneDeviceStrategy("cpu:0"),
    "two": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "sharded": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"),
    "hybrid": lambda: sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"kernel": "central"}),
    "layouts": lambda: sg.MirroredStrategy(
        [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]], layout_map={".*kernel": ("logical", None)}
    ),
}


def scope_of(strategy: Any) -> Any:
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def layers() -> list[keras.Layer]:
    return [
        keras.layers.Dense(4, "tanh"),
        keras.layers.Dropout(0.3),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    ]


class Subclassed(keras.Model):
    """A model that is built only by its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def call(self, inputs: Any, training: bool = False) -> Any:
        for layer in self.inner:
            inputs = layer(inputs, training=training)
        return inputs


def fill(variables: list[Any]) -> list[np.ndarray]:
    """Sets variables to values that no initializer produces, and returns them."""
    generator = np.random.default_rng(3)
    for variable in variables:
        value = generator.integers(5, 99, variable.shape) / (1 if "seed" in variable.path else 100)
        variable.assign(value.astype(variable.dtype))
    return [np.asarray(variable.value) for variable in variables]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[np.ndarray]]:
    """A checkpoint of a model and a counter, and the saved values of the model."""
    model = keras.Sequential([keras.layers.Input((4,)), *layers()])
    values = fill(model.variables)
    checkpoint = sg.train.Checkpoint(model=model, step=sg.Variable(5, dtype="int32"))
    return checkpoint.save(tmp_path_factory.mktemp("saved") / "ckpt"), values


def assert_has(model: keras.Model, values: list[np.ndarray]) -> None:
    assert len(model.variables) == len(values)
    for variable, value in zip(model.variables, values, strict=True):
        np.testing.assert_array_equal(np.asarray(variable.value), value, err_msg=variable.path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequential", "subclassed"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_model_has_the_saved_values_after_build_and_call(name: str, kind: str, saved: Any) -> None:
    path, values = saved
    strategy = STRATEGIES[name]()

    def make() -> keras.Model:
        with scope_of(strategy):
            return keras.Sequential(layers()) if kind == "sequential" else Subclassed()

    build_or_call: list[Callable[[keras.Model], Any]] = [
        lambda model: model(ROWS),
        lambda model: model.predict(ROWS, verbose=0),
    ]
    if kind == "sequential":
        build_or_call.append(lambda model: model.build((None, 4)))
    for bring_into_being in build_or_call:
        model = make()
        status = sg.train.Checkpoint(model=model).restore(path).expect_partial()
        assert not model.built
        with scope_of(strategy):
            bring_into_being(model)
        status.assert_existing_objects_matched()
        assert_has(model, values)


@pytest.mark.parametrize(
    ("name", "is_eager"),
    [
        ("two", False),
        pytest.param("two", True, marks=pytest.mark.slow),
        *(
            pytest.param(name, False, marks=pytest.mark.slow)
            for name in STRATEGIES
            if name not in ("none", "two")
        ),
    ],
)
def test_values_are_there_in_the_step_that_creates_the_variables(
    name: str, is_eager: bool, saved: Any
) -> None:
    path, values = saved
    strategy = STRATEGIES[name]()
    reference = keras.Sequential([keras.layers.Input((4,)), *layers()])
    for variable, value in zip(reference.variables, values, strict=True):
        variable.assign(value)
    expected = np.asarray(reference(ROWS))
    sg.config.run_eagerly(is_eager)
    try:
        with strategy.scope():
            model = keras.Sequential(layers()) if is_eager else Subclassed()
            step = sg.Variable(0, dtype="int32")
        status = sg.train.Checkpoint(model=model, step=step).restore(path)
        assert int(step) == 5
        with pytest.raises(
            AssertionError, match=r"is only partly restored\. Values without an object:"
        ):
            status.assert_consumed()
        results = strategy.run(model, args=(ROWS,))
        np.testing.assert_allclose(strategy.local_results(results)[0], expected, atol=1e-5)
        status.assert_consumed()
        assert_has(model, values)
    finally:
        sg.config.run_eagerly(False)


def trained(model: keras.Model) -> list[float]:
    history = model.fit(ROWS, TARGETS, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"]


def dense(*, is_built: bool) -> keras.Model:
    begin = [keras.layers.Input((4,))] if is_built else []
    model = keras.Sequential([*begin, keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """A checkpoint of plain Keras training, and the losses after it."""
    keras.utils.set_random_seed(1)
    model = dense(is_built=True)
    trained(model)
    path = sg.train.Checkpoint(net=model).save(tmp_path_factory.mktemp("halfway") / "ckpt")
    return path, trained(model)


@pytest.mark.parametrize(
    ("name", "is_compiled_later"),
    [
        ("none", True),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("none", "two", "sharded")),
    ],
)
def test_fit_resumes_under_another_strategy(name: str, is_compiled_later: bool, halfway) -> None:
    path, losses = halfway
    with scope_of(STRATEGIES[name]()):
        model = dense(is_built=False)
        if is_compiled_later:
            model = keras.Sequential([keras.layers.Input((4,)), *model.layers])
    status = sg.train.Checkpoint(net=model).restore(path)
    if is_compiled_later:
        model.compile(keras.optimizers.Adam(0.05), "mse")
    assert int(model.optimizer.iterations) == 4  # which is there before the model is built
    np.testing.assert_allclose(trained(model), losses, rtol=1e-5)
    status.assert_consumed()
    assert int(model.optimizer.iterations) == 8


def test_custom_loop_resumes_with_an_optimizer_built_by_its_first_update(
    halfway: Any, tmp_path: Path
) -> None:
    """Saved as two objects by plain Keras, restored in a step of two replicas."""
    path, _ = halfway
    plain = dense(is_built=True)
    sg.train.Checkpoint(net=plain).restore(path)
    apart = sg.train.Checkpoint(net=plain, optimizer=plain.optimizer).save(tmp_path / "ckpt")

    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.05)
    status = sg.train.Checkpoint(net=model, optimizer=optimizer).restore(apart).expect_partial()
    assert int(optimizer.iterations) == 4

    def step(rows: Any, targets: Any) -> Any:
        model(rows)

        def loss_of() -> Any:
            errors = keras.losses.mean_squared_error(targets, model(rows))
            return sg.compute_average_loss(errors, global_batch_size=4)

        loss, grads = sg.value_and_grad(loss_of, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    batches = [(ROWS[first : first + 4], TARGETS[first : first + 4]) for first in (0, 4)]
    for batch, own in zip(strategy.distribute_dataset(batches), batches, strict=True):
        strategy.run(step, args=batch)
        plain.train_on_batch(*own)
    assert int(optimizer.iterations) == 6
    for one, two in zip(
        [*model.variables, *optimizer.variables],
        [*plain.variables, *plain.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(one.value), two.value, rtol=1e-5, atol=1e-6)
    status.assert_existing_objects_matched()


def test_object_that_is_set_later_is_restored_then(saved: Any, tmp_path: Path) -> None:
    path, values = saved
    checkpoint = sg.train.Checkpoint()
    status = checkpoint.restore(path)
    assert int(checkpoint.save_counter) == 1
    checkpoint.step = sg.Variable(0, dtype="int32")
    checkpoint.model = keras.Sequential(layers())
    assert int(checkpoint.step) == 5
    checkpoint.model.build((None, 4))
    assert_has(checkpoint.model, values)
    status.assert_consumed()
    checkpoint.step.assign(6)
    checkpoint.step = checkpoint.step  # is restored once
    assert int(checkpoint.step) == 6
    again = sg.Variable(0, dtype="int32")
    sg.train.Checkpoint(step=again).restore(checkpoint.save(tmp_path / "ckpt")).expect_partial()
    assert int(again) == 6
    with pytest.raises(AttributeError, match="Checkpoint has no 'other'"):
        _ = checkpoint.other


@pytest.mark.parametrize("kind", ["sequential", "subclassed"])
def test_another_shape_or_number_is_refused_when_the_variable_is_created(
    kind: str, tmp_path: Path
) -> None:
    built = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    path = sg.train.Checkpoint(model=built).save(tmp_path / "ckpt")

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = Net() if kind == "subclassed" else keras.Sequential([keras.layers.Dense(2)])
    sg.train.Checkpoint(model=model).restore(path)
    told = r"model/trainable_variables/\S*kernel.* has shape \(5, 2\) here but \(4, 2\) in .*ckpt-1"
    with pytest.raises(ValueError, match=told):
        strategy.run(model, args=(np.zeros((2, 5), "float32"),))
    more = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    sg.train.Checkpoint(model=more).restore(path).expect_partial()
    with pytest.raises(ValueError, match="variables of model, which has"):
        more.build((None, 4))


@pytest.mark.parametrize("name", ["none", pytest.param("two", marks=pytest.mark.slow)])
def test_metric_that_makes_its_state_with_the_first_update(name: str, tmp_path: Path) -> None:
    predicted = ROWS[:, :2]
    whole = keras.metrics.R2Score()
    whole.update_state(ROWS[:, 1:3], predicted)
    path = sg.train.Checkpoint(score=whole).save(tmp_path / "ckpt")
    strategy = STRATEGIES[name]()
    with scope_of(strategy):
        metric = keras.metrics.R2Score()
    status = sg.train.Checkpoint(score=metric).restore(path)
    if strategy is None:
        metric.update_state(ROWS[:, 2:], predicted)
    else:  # two replicas
        strategy.run(metric.update_state, args=(ROWS[:, 2:], predicted))
        whole.update_state(ROWS[:, 2:], predicted)
    whole.update_state(ROWS[:, 2:], predicted)
    status.assert_consumed()
    np.testing.assert_allclose(float(metric.result()), float(whole.result()), rtol=1e-5)


class Counting(keras.layers.Layer):
    """A layer that creates its variable in the constructor and none in build."""

    def __init__(self) -> None:
        super().__init__()
        self.count = sg.Variable(0.0, trainable=False, aggregation="mean")

    def call(self, inputs: Any) -> Any:
        self.count.assign_add(1.0)
        return inputs * self.count


def test_layer_that_is_built_in_a_step_and_makes_no_variables_there(tmp_path: Path) -> None:
    """The value is set once, outside the compiled step."""
    old = Counting()
    old.count.assign(5.0)
    old.built = True
    path = sg.train.Checkpoint(layer=old).save(tmp_path / "ckpt")
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        new = Counting()
    status = sg.train.Checkpoint(layer=new).restore(path)
    ones = np.ones((2, 1), "float32")
    results = [strategy.run(new, args=(ones,)) for _ in range(2)]
    seen = [np.asarray(strategy.local_results(one)[0])[0, 0].item() for one in results]
    assert seen == [6.0, 7.0]
    status.assert_consumed()


def test_a_later_restore_takes_the_place_of_one_that_waits(saved: Any, tmp_path: Path) -> None:
    model = keras.Sequential(layers())
    checkpoint = sg.train.Checkpoint(model=model)
    checkpoint.restore(saved[0])
    other = keras.Sequential([keras.layers.Input((4,)), *layers()])
    checkpoint.restore(sg.train.Checkpoint(model=other).save(tmp_path / "ckpt"))
    model.build((None, 4))
    assert_has(model, [np.asarray(variable.value) for variable in other.variables])
    assert "called" not in repr(vars(model)["build"])


def test_pending_values_stay_on_disk(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = restoration.files.read_arrays

    def counted(*args: Any) -> Any:
        items = original(*args)
        read.append(sum(array.size for arrays in items.values() for array in arrays.values()))
        return items

    monkeypatch.setattr(restoration.files, "read_arrays", counted)
    path, values = saved
    model = keras.Sequential(layers())
    sg.train.Checkpoint(model=model).restore(path).expect_partial()
    assert read == [1]  # the counter of saves
    model.build((None, 4))
    assert read == [1, sum(value.size for value in values)]


def test_manager_restores_a_model_that_is_not_built(saved: Any, tmp_path: Path) -> None:
    """Also if the newest checkpoint is damaged, which is detected at once."""

    def manager_of(step: int) -> tuple[sg.train.CheckpointManager, keras.Model]:
        model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
        counter = sg.Variable(step, dtype="int32")
        checkpoint = sg.train.Checkpoint(model=model, step=counter)
        return sg.train.CheckpointManager(checkpoint, tmp_path, None, step_counter=counter), model

    manager, model = manager_of(1)
    assert manager.restore_or_initialize() is None
    model.build((None, 4))
    values = fill(model.variables)
    good = manager.save()
    manager.checkpoint.step.assign(2)
    bad = manager.save()
    assert good is not None
    assert bad is not None
    # One array: Orbax complains in other threads where it cannot read several.
    for file in (Path(bad) / "pytree" / "d").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    manager, model = manager_of(0)
    assert manager.restore_or_initialize(skip_damaged=True) == good
    model.build((None, 4))
    assert_has(model, values)


# Restores by shards: any number of devices and any layout, from whole arrays, too.

LARGE = np.random.default_rng(0).standard_normal((1024, 512), "float32")
WIDE = np.random.default_rng(1).standard_normal((3, 2**18), "float32")
SMALL = np.arange(2048, dtype="float32")


def checkpoint(count: int, values: bool = False, dtype: str = "float32") -> Any:
    options: Any = {"shard_state": "all"} if count > 1 else {}
    with sg.MirroredStrategy(jax.devices()[:count], **options).scope():
        state = {
            name: sg.Variable(value if values else np.zeros_like(value), dtype=dtype)
            for name, value in (("large", LARGE), ("small", SMALL), ("wide", WIDE))
        }
    return sg.train.Checkpoint(state=state)


def assert_restored(restored: Any) -> None:
    for name, value in (("large", LARGE), ("small", SMALL), ("wide", WIDE)):
        variable = restored.state[name]
        expected = value.astype(variable.dtype)
        np.testing.assert_array_equal(np.asarray(variable.value), expected, err_msg=name)


def path_of_saved(folder: Path, count: int) -> str:
    return checkpoint(count, values=True).save(folder / "ckpt")


@pytest.mark.parametrize(
    ("saved", "opened", "dtype"),
    [(4, 2, "bfloat16"), *((*one, "float32") for one in [(4, 4), (4, 2), (2, 4), (4, 1), (1, 4)])],
)
def test_any_number_of_devices_and_dtype(
    saved: int, opened: int, dtype: str, tmp_path: Path
) -> None:
    path = path_of_saved(tmp_path, saved)
    restored = checkpoint(opened, dtype=dtype)
    restored.restore(path).assert_consumed()
    assert_restored(restored)
    assert restored.state["large"].stored.dtype == dtype
    assert restored.state["large"].stored.sharding.is_fully_replicated == (opened == 1)


def test_layout_within_replicas(tmp_path: Path) -> None:
    """Two replicas of two devices hold columns; the checkpoint has rows, and the reverse."""
    groups = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
    rules = {"large": (None, "logical")}
    with sg.MirroredStrategy(groups, layout_map=rules).scope():
        state = {"large": sg.Variable(np.zeros_like(LARGE), name="large")}
    divided: Any = sg.train.Checkpoint(state=state)
    divided.restore(path_of_saved(tmp_path, 4)).expect_partial()
    np.testing.assert_array_equal(np.asarray(divided.state["large"].value), LARGE)
    path = divided.save(tmp_path / "columns")
    restored = sg.train.Checkpoint(state={"large": checkpoint(4).state["large"]})
    restored.restore(path).assert_consumed()
    np.testing.assert_array_equal(np.asarray(state["large"].value), LARGE)


@pytest.mark.parametrize("is_saved", [True, False])
def test_next_step_reuses_the_memory(is_saved: bool, tmp_path: Path) -> None:
    one = checkpoint(2, values=True)
    variable = one.state["large"]

    def step() -> None:
        variable.stored = jax.jit(lambda x: x + 1, donate_argnums=0)(variable.stored)

    def addresses() -> list[int]:
        """Of an array of its own: no buffer that has a view is donated."""
        put = jax.device_put(variable.stored, variable.stored.sharding)
        return [shard.data.unsafe_buffer_pointer() for shard in put.addressable_shards]

    if is_saved:
        step()  # replaces arrays that share the memory of NumPy's
        one.save(tmp_path / "ckpt")
    else:
        one.restore(path_of_saved(tmp_path, 4))
    before = addresses()
    step()
    assert addresses() == before


@pytest.mark.parametrize("fits", [True, False])
def test_damaged_shard_changes_nothing(fits: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(restoration, "fits_in_memory", lambda size_bytes: fits)
    path = path_of_saved(tmp_path, 4)
    restored = checkpoint(2)
    files = Path(path).glob("state_state/shards.process_0/d/*")
    file = max(files, key=lambda one: one.stat().st_size)
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes(9) + content[middle + 9 :])
    with pytest.raises(DataLossError, match=r"(wide|large) differs from the saved one"):
        restored.restore(path)
    assert not any(np.any(np.asarray(one.value)) for one in restored.state.values())
    file.write_bytes(content)
    restored.restore(path).assert_consumed()
    assert_restored(restored)


@pytest.mark.parametrize("is_same", [True, False])
def test_processes_that_find_other_files_get_the_whole(
    is_same: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    path = path_of_saved(tmp_path, 4)
    monkeypatch.setattr(restoration, "agree_on_all", lambda name, own: own and is_same)
    restored = checkpoint(4)
    variable = restored.state["large"]
    entry = {"path": "large", "shape": [1024, 512], "dtype": "float32"}
    values = [SavedValue(("state", "large"), variable, "state_state", entry | {"shard_shape": []})]
    assert (("state", "large") in ShardedRestore(Path(path), values)) == is_same


@pytest.mark.parametrize("fits", [True, False])
def test_without_memory_one_value_at_a_time_is_on_the_host(
    fits: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(restoration, "fits_in_memory", lambda size_bytes: fits)
    count = 6
    with sg.MirroredStrategy(jax.devices()[:4], shard_state="all").scope():
        state = {str(index): sg.Variable(LARGE) for index in range(count)}
    restored = sg.train.Checkpoint(state=state)
    path = restored.save(tmp_path / "ckpt")
    restored.restore(path)  # modules that are imported
    tracemalloc.start()
    restored.restore(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peak_bytes > count * LARGE.nbytes) == fits
    assert fits or peak_bytes < 2 * LARGE.nbytes


# Pieces of a broadcast cover every byte of every array once, in order.


@given(st.lists(st.integers(0, 100), max_size=5), st.sampled_from([1, 7, 64]))
def test_pieces_hold_all_bytes_in_order(sizes, piece_bytes) -> None:
    arrays = [np.arange(size) + 1000 * index for index, size in enumerate(sizes)]
    sent = []
    for spans in restoration._pieces(sizes, piece_bytes):
        piece = np.full(piece_bytes, -1)
        for index, begin, end, at in spans:
            assert (piece[at : at + end - begin] == -1).all(), "spans overlap"
            piece[at : at + end - begin] = arrays[index][begin:end]
        sent.append(piece)
    together = np.concatenate([*sent, np.zeros(0)])
    np.testing.assert_array_equal(together[: sum(sizes)], np.concatenate([*arrays, np.zeros(0)]))
    assert (together[sum(sizes) :] == -1).all()
    assert len(sent) == -(-sum(sizes) // piece_bytes)


def test_other_process_gets_the_bytes_of_the_first(monkeypatch) -> None:
    """Both processes in turn, with the pieces of the first recorded."""
    monkeypatch.setattr(restoration, "_MIN_PIECE_BYTES", 4)
    monkeypatch.setattr(restoration, "_MAX_PIECE_BYTES", 16)
    items = {
        "model": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3).T, "flag": np.array(True)},
        "other": {"empty": np.zeros((0, 2), np.int8), "count": np.array([7, 8], np.int64)},
    }
    entries = {
        name: [{"path": path, "shape": a.shape, "dtype": a.dtype.name} for path, a in own.items()]
        for name, own in items.items()
    }
    pieces = []
    monkeypatch.setattr(restoration, "_on_all", lambda topology, piece: piece.copy())

    def record(piece, program):
        pieces.append(piece)
        return piece

    monkeypatch.setattr(restoration, "current_group", lambda: SimpleNamespace(process_id=0))
    monkeypatch.setattr(restoration, "compute_on_every_process", record)
    own = broadcast_from_first(items, entries)
    received = iter(list(pieces))
    monkeypatch.setattr(restoration, "current_group", lambda: SimpleNamespace(process_id=1))
    monkeypatch.setattr(restoration, "compute_on_every_process", lambda *_: next(received))
    for arrays in (own, broadcast_from_first(None, entries)):
        for name, expected in items.items():
            assert arrays[name].keys() == expected.keys()
            for path, array in expected.items():
                np.testing.assert_array_equal(arrays[name][path], array)
                assert arrays[name][path].dtype == array.dtype
    assert next(received, None) is None
    monkeypatch.setattr(restoration, "current_group", lambda: None)
    assert broadcast_from_first(items, {}) == items  # a process by itself has them already
