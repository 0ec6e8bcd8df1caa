"""`sg.compile(model, distribute=...)`: a model made outside every scope moves to a strategy."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import operator
import pickle
import warnings
from typing import Any

import cloudpickle
import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.finding import planning_for
from stratagem.keras.variables import creation
from stratagem.keras.variables.creation import adopt
from stratagem.keras.variables.requests import Annotations, annotated, current_annotations
from stratagem.parameter_server.keras.variable import InitialRows
from stratagem.planning.targets import parse_target
from stratagem.variables.registry import VariableKind
from tests.marks import slow
from tests.parity.comparison import (
    Scope,
    assert_like_plain_keras,
    fitted,
    mirrored,
    regression,
    small_regressor,
)
from tests.unit.keras.replicas import kind_of, values_of
from tests.unit.parameter_server.clusters import local_strategy


@pytest.mark.parametrize("are_objects", [False, True])
def test_moved_model_trains_as_one_device_does(are_objects: bool) -> None:
    """Objects are made before `sg.compile` is called, so outside the scope."""

    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        model = small_regressor()
        arguments: Any = {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"]}
        if are_objects:
            arguments["optimizer"] = keras.optimizers.SGD(0.1, momentum=0.9)
            arguments["metrics"] = [keras.metrics.MeanAbsoluteError()]
        with scope():
            strategy = sg.get_strategy() if sg.has_strategy() else None
        sg.compile(model, distribute=strategy, **arguments)
        assert model.distribute_strategy is (strategy or sg.get_strategy())
        return fitted(model, x, y, batch_size=4)

    assert_like_plain_keras(job, replicas=(3,))


def test_moved_batch_norm_and_dropout_get_the_kinds_of_a_model_made_in_the_scope() -> None:
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dropout(0.5)])
    before, values, strategy = list(model.weights), values_of(model.weights), mirrored(2)
    sg.compile(model, optimizer="sgd", loss="mse")  # where it is
    assert kind_of(model.weights[0]) is None
    for optimizer in ("sgd", "adam"):  # and again
        sg.compile(model, distribute=strategy, optimizer=optimizer, loss="mse")
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    assert all(map(operator.is_, model.weights, before))
    for value, wanted in zip(values_of(model.weights), values, strict=True):
        np.testing.assert_array_equal(value, wanted)
    kinds = {variable.name: kind_of(variable) for variable in model.variables}
    assert kinds["gamma"] is VariableKind.MIRRORED
    assert kinds["moving_mean"] is kinds["moving_variance"] is VariableKind.ON_READ
    assert kinds["seed_generator_state"] is VariableKind.MIRRORED
    np.testing.assert_allclose(values_of(model.weights)[3], np.ones(3))


def test_model_of_another_strategy_cannot_be_moved() -> None:
    with mirrored(2).scope():
        model = small_regressor()
    with pytest.raises(ValueError, match=r"was created under MirroredStrategy.*model runs under"):
        sg.compile(model, distribute=mirrored(3), optimizer="sgd", loss="mse")


@pytest.mark.slow
def test_optimizer_and_metric_objects_given_to_compile_move_to_the_strategy_of_the_model() -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        before = keras.optimizers.Adam(0.1), keras.metrics.MeanAbsoluteError()
        with scope():
            model = small_regressor()
            model.compile(optimizer=before[0], loss="mse", metrics=[before[1]])
        first = fitted(model, x, y)
        after = keras.optimizers.SGD(0.1, momentum=0.9), keras.metrics.MeanSquaredError()
        model.compile(optimizer=after[0], loss="mae", metrics=[after[1]])
        return {f"first {key}": value for key, value in first.items()} | fitted(model, x, y)

    assert_like_plain_keras(job, replicas=(1, 3))


def test_optimizer_that_is_set_behind_compile_is_named() -> None:
    with mirrored(2).scope():
        model = small_regressor()
        model.compile(optimizer="sgd", loss="mse")
    model.optimizer = keras.optimizers.Adam(name="late")
    with pytest.raises(ValueError, match="Fix: create the optimizer 'late' in `with strategy"):
        model.fit(*regression(), verbose=0)


def test_layer_that_was_built_outside_is_named() -> None:
    outside = keras.layers.Dense(1, name="stray")
    outside.build((None, 4))
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), outside])
        model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="create or build 'stray' in `with"):
        model.fit(*regression(), verbose=0)


@pytest.mark.parametrize("shard_state", [None, "all"])
def test_no_value_is_drawn_for_abstract_devices(shard_state: str | None) -> None:
    """Also if the variable moves to other abstract devices. A read draws it."""
    drawn: list[Any] = []

    def ones(shape: Any, dtype: Any = None) -> Any:
        drawn.append(shape)
        return keras.ops.ones(shape, dtype)

    with planning_for(parse_target("1xH100").topology):
        first = sg.OneDeviceStrategy("gpu:0")
    with planning_for(parse_target("4xH100").topology):
        second = sg.MirroredStrategy(shard_state=shard_state)
    with first.scope():
        variable = keras.Variable(ones, shape=(64, 32), dtype="bfloat16")
    adopt(variable, second)
    assert not drawn
    assert variable.distribute_strategy is second
    value = np.asarray(variable.value)
    assert drawn == [(64, 32)]
    np.testing.assert_array_equal(value, np.ones((64, 32), value.dtype))
    assert value.dtype == "bfloat16"


# Rows of initial values, against the whole of them.

INITIALIZERS = {
    "zeros": keras.initializers.Zeros(),
    "ones": keras.initializers.Ones(),
    "constant": keras.initializers.Constant(2.5),
    "uniform": keras.initializers.RandomUniform(-3.0, 1.0, seed=1),
    "normal": keras.initializers.RandomNormal(1.0, 2.0, seed=2),
    "truncated": keras.initializers.TruncatedNormal(1.0, 2.0, seed=3),
    "no seed": keras.initializers.RandomUniform(),
    "large seed": keras.initializers.RandomUniform(seed=2**31 + 5),
    "glorot uniform": keras.initializers.GlorotUniform(seed=4),
    "glorot normal": keras.initializers.GlorotNormal(seed=5),
    "scaled": keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=8),
}


@pytest.mark.compatibility
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("uniform", (37, 5)),
        ("normal", (37, 5)),
        *(slow(name, shape) for name in INITIALIZERS for shape in ((64,), (9, 2, 3))),
    ],
)
def test_rows_are_those_of_the_whole(name, shape) -> None:
    initializer = INITIALIZERS[name]
    whole = np.asarray(initializer(shape, "float32"))
    rows = pickle.loads(cloudpickle.dumps(InitialRows(initializer, shape, "float32")))
    parts = [rows(first, min(4, shape[0] - first)) for first in range(0, shape[0], 4)]
    # The compiler may round differently in arrays of another shape.
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-6, atol=1e-7)
    assert rows(0, 0).shape == (0, *shape[1:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_width_of_numbers(dtype) -> None:
    initializer = keras.initializers.RandomUniform(seed=1)
    with jax.enable_x64(dtype == "float64"):
        whole = np.asarray(initializer((20, 3), dtype))
        got = InitialRows(initializer, (20, 3), dtype)(7, 5)
    assert got.dtype == whole.dtype == dtype
    np.testing.assert_array_equal(got, whole[7:12])


def test_next_key_of_a_generator_is_drawn_once() -> None:
    seeds = [keras.random.SeedGenerator(3) for _ in range(2)]
    ours, theirs = (keras.initializers.RandomUniform(seed=seed) for seed in seeds)
    rows = InitialRows(ours, (10, 2), "float32")
    np.testing.assert_array_equal(rows(2, 3), np.asarray(theirs((10, 2), "float32"))[2:5])
    np.testing.assert_array_equal(seeds[0].state.value, seeds[1].state.value)


def test_places_beyond_32_bits_count_on() -> None:
    """Two halves that meet where the lower half of the place begins anew."""
    rows = InitialRows(keras.initializers.RandomUniform(seed=1), (2**31, 4), "float32")
    first = 2**30 - 3
    np.testing.assert_array_equal(
        rows(first, 6), np.concatenate([rows(first, 3), rows(first + 3, 3)])
    )
    assert not np.array_equal(rows(first + 3, 3), rows(0, 3))


def test_numbers_of_derived_keys_are_refused(monkeypatch) -> None:
    def uniform(shape, seed, **_):
        return jax.random.uniform(jax.random.split(seed)[0], shape)

    monkeypatch.setattr(keras.random, "uniform", uniform)
    rows = InitialRows(keras.initializers.RandomUniform(seed=1), (4, 2), "float32")
    with pytest.raises(NotImplementedError, match="was to be drawn from a derived key"):
        rows(0, 2)


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.Orthogonal(),
        keras.initializers.Constant(np.ones((4, 2))),
        lambda shape, dtype: np.zeros(shape, dtype),
    ],
    ids=["orthogonal", "array", "function"],
)
def test_initializer_that_needs_the_whole_is_reported(initializer) -> None:
    with pytest.raises(NotImplementedError, match="which is made in parts"):
        InitialRows(initializer, (4, 2), "float32")


# Variables that `keras.device` puts on a device: honoured or refused, never ignored.

_DEVICES = ["cpu:1", "cpu:2"]


def _trained(strategy, device: str | None = None) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)).astype("float32"), np.ones((12, 1), "float32")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        first, second = keras.layers.Dense(4), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((3,)), first])
        if device is None:
            model.add(second)
        else:
            with keras.device(device):
                model.add(second)
                model.build()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    if device is not None:
        assert second.kernel.stored.devices() == {jax.devices()[3]}
        assert first.kernel.store is None
        momentum = [one for one in model.optimizer.variables if one.shape == (4, 1)]
        assert [one.stored.devices() for one in momentum] == [{jax.devices()[3]}]
    return model.get_weights()


def test_hybrid_strategy_keeps_it_there_and_has_the_numbers_of_one_device() -> None:
    hybrid = sg.HybridStrategy(_DEVICES, placement={})
    expected = _trained(sg.OneDeviceStrategy("cpu:0"))
    for own, one in zip(_trained(hybrid, "cpu:3"), expected, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-6)


def test_it_goes_before_rules_and_ends_with_its_block() -> None:
    strategy = sg.HybridStrategy(_DEVICES, placement={"table": "sharded"})
    with strategy.scope():
        with keras.device("cpu:3"):
            there = keras.Variable(np.ones((4, 2), "float32"), name="table")
            with keras.device("cpu:4"):
                inner = keras.Variable(np.ones(2, "float32"))
        parted = keras.Variable(np.ones((4, 2), "float32"), name="table")
    assert there.stored.devices() == {jax.devices()[3]}
    assert inner.stored.devices() == {jax.devices()[4]}
    assert len(parted.stored.devices()) == 2


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: sg.MirroredStrategy(_DEVICES), {}),
        (lambda: sg.CentralStorageStrategy(_DEVICES), {}),
        (lambda: sg.MultiWorkerMirroredStrategy(placement={"table": "sharded"}), {}),
        (local_strategy, {}),
        (
            lambda: sg.HybridStrategy(_DEVICES, placement={}),
            {"synchronization": sg.VariableSynchronization.ON_READ},
        ),
    ],
    ids=["mirrored", "central", "workers", "servers", "hybrid, of which replicas have parts"],
)
def test_other_strategies_and_variables_refuse_it(make, options) -> None:
    refused = pytest.raises(ValueError, match="Expected no device for a single variable")
    made = make() if make is local_strategy else contextlib.nullcontext(make())
    with made as strategy, strategy.scope(), keras.device("cpu:3"), refused:
        sg.Variable(np.ones(3, "float32"), **options)


def test_the_only_device_of_a_strategy_may_be_named() -> None:
    with sg.OneDeviceStrategy("cpu:1").scope(), keras.device("cpu:1"):
        variable = keras.Variable(np.ones(3, "float32"))
    assert np.asarray(variable).sum() == 3
    central = sg.CentralStorageStrategy(_DEVICES, "cpu:3")
    with central.scope(), keras.device("cpu:3"):
        assert keras.Variable(np.ones(3, "float32")).stored.devices() == {jax.devices()[3]}
    with keras.device("cpu:2"):  # of no strategy
        assert keras.ops.ones(2).devices() == {jax.devices()[2]}


def test_annotation_holds_within_its_block_and_thread() -> None:
    outside = current_annotations()
    with annotated(is_table=True), concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(current_annotations).result() == outside
        with pytest.raises(KeyError), annotated(is_table=False):
            raise KeyError
        assert current_annotations() == dataclasses.replace(outside, is_table=True)
    assert current_annotations() == outside == Annotations()


# Meshes of Keras while a script is planned for devices that do not exist.

_HERE = keras.distribution.list_devices()


def test_mesh_has_the_devices_of_the_plan() -> None:
    mesh = keras.distribution.DeviceMesh((len(_HERE),), ("batch",))  # without one: of this machine
    assert mesh.devices.tolist() == _HERE
    with planning_for(parse_target("8xH100").topology):
        names = [f"gpu:{index}" for index in range(8)]
        assert keras.distribution.list_devices() == names
        assert keras.distribution.list_devices("GPU") == names
        assert keras.distribution.list_devices("cpu") == _HERE
        mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
        assert mesh.devices.tolist() == [names[:4], names[4:]]
        given = keras.distribution.DeviceMesh((2,), ("batch",), devices=["gpu:1", "gpu:0"])
        assert given.devices.tolist() == ["gpu:1", "gpu:0"]
        with pytest.raises(ValueError, match="does not match the number of devices"):
            keras.distribution.DeviceMesh((3, 3), ("batch", "model"))


def test_mesh_of_a_layout_map_groups_the_devices_of_the_plan() -> None:
    with planning_for(parse_target("8xH100").topology):
        mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map[".*kernel"] = (None, "model")
        topology = sg.MirroredStrategy(layout_map=layout_map, shard_state="all").topology
    assert (topology.num_replicas, topology.num_logical_devices) == (2, 4)


# A distribution of Keras's own beside a strategy is ignored, and said to be, once.


@pytest.fixture
def nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "_warned_of", set())


@pytest.mark.usefixtures("nothing_warned_of")
@pytest.mark.parametrize("is_outer", [True, False])
def test_distribution_is_warned_of_once(is_outer) -> None:
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    strategy = mirrored(2)
    outer, inner = (distribution, strategy) if is_outer else (strategy, distribution)
    warned = pytest.warns(RuntimeWarning, match="DataParallel is current .* is ignored")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for alone in (strategy, distribution):
            with alone.scope():
                keras.layers.Dense(2).build((None, 3))
    with warned as caught, outer.scope(), inner.scope():
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert "Fix: leave out keras.distribution" in str(caught[0].message)
    assert len(caught) == 1
