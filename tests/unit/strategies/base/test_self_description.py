"""`describe`: places and bytes of variables, compared with the arrays on the devices."""

from __future__ import annotations

import collections

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.test_rendering import require_plain

_DEVICES = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def _model() -> keras.Model:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


_STRATEGIES = {
    "mirrored": lambda: sg.MirroredStrategy(_DEVICES),
    "optimizer": lambda: sg.MirroredStrategy(_DEVICES, shard_state="optimizer"),
    "all": lambda: sg.MirroredStrategy(_DEVICES, shard_state="all"),
    "central": lambda: sg.CentralStorageStrategy(_DEVICES, parameter_device="cpu:0"),
    "one device": lambda: sg.OneDeviceStrategy("cpu:0"),
}


def _on_devices(variables) -> collections.Counter[str]:
    """Bytes of all shards on each device, counted by the shards themselves."""
    found: collections.Counter[str] = collections.Counter()
    for variable in variables:
        array = variable.storage if getattr(variable, "store", None) is None else variable.stored
        for shard in array.addressable_shards:
            found[f"cpu:{shard.device.id}"] += np.asarray(shard.data).nbytes
    return found


@pytest.mark.parametrize("make", _STRATEGIES.values(), ids=_STRATEGIES)
def test_bytes_are_of_the_arrays_on_each_device(make) -> None:
    strategy = make()
    with strategy.scope():
        model = _model()
    described = strategy.describe(model)
    live = strategy.variables.live()
    counted = _on_devices(live)
    assert {one.name: one.num_bytes for one in described.devices if one.num_bytes} == counted
    assert described.stored_bytes == counted.total()
    assert described.variable_bytes == sum(
        int(np.prod(one.shape)) * np.dtype(one.dtype).itemsize for one in live
    )
    assert {one.path for one in described.variables} == {one.path for one in live}
    assert [one.replica for one in described.devices] == [*range(strategy.num_replicas_in_sync)]


@pytest.mark.parametrize(
    ("name", "kernel", "slot"),
    [
        ("mirrored", "copy per replica", "copy per replica"),
        ("optimizer", "copy per replica", "shard per replica"),
        ("all", "shard per replica", "shard per replica"),
        ("central", "one copy on cpu:0", "one copy on cpu:0"),
        ("one device", "one copy", "one copy"),
    ],
)
def test_places(name, kernel, slot) -> None:
    strategy = _STRATEGIES[name]()
    with strategy.scope():
        _kept = _model()
    places = {one.path.split("/", 1)[1]: one.place for one in strategy.describe().variables}
    assert (
        next(
            place
            for path, place in places.items()
            if path == "dense/kernel" or (path.startswith("dense") and path.endswith("/kernel"))
        )
        == kernel
    )
    assert next(place for path, place in places.items() if path.endswith("kernel_momentum")) == slot


def test_value_of_each_replica_and_shards_of_a_replica() -> None:
    strategy = sg.MirroredStrategy(_DEVICES)
    with strategy.scope():
        total = sg.Variable(0.0, synchronization="on_read", aggregation="sum", name="total")
    (one,) = strategy.describe().variables
    assert (one.place, one.num_bytes, one.stored_bytes) == ("value per replica", 4, 16)
    assert float(total) == 0.0


def test_only_the_variables_of_a_model_are_described() -> None:
    strategy = sg.MirroredStrategy(_DEVICES[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        other = sg.Variable(np.ones(1000, "float32"))
    paths = {one.path for one in strategy.describe(model).variables}
    assert paths == {one.path for one in model.variables}
    assert strategy.describe().variable_bytes == 5 * 4 + other.value.nbytes


def test_model_of_another_strategy_is_refused() -> None:
    strategy = sg.MirroredStrategy(_DEVICES[:2])
    with sg.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"belongs to OneDeviceStrategy\(.*(?s:.)*its own"):
        strategy.describe(model)
    free = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="belongs to no strategy"):
        strategy.describe(free)
    with pytest.raises(TypeError, match="describe received 3 of type int"):
        strategy.describe(3)  # pyright: ignore[reportArgumentType]


def test_description_changes_nothing_and_works_in_a_scope() -> None:
    strategy = sg.MirroredStrategy(_DEVICES[:2])
    with strategy.scope():
        scale = sg.Variable(2.0)
        strategy.describe()
    assert strategy.run(lambda: scale * 1.0).components == (2.0, 2.0)
    (name,) = strategy.describe().programs
    assert strategy.describe().programs == {name: 1}


@pytest.mark.slow
def test_methods_of_keras_have_their_names() -> None:
    strategy = sg.MirroredStrategy(_DEVICES[:2])
    with strategy.scope():
        model = _model()
    x, y = np.ones((8, 64), "float32"), np.ones((8, 2), "float32")
    model.fit(x, y, epochs=2, batch_size=4, verbose=0)
    model.evaluate(x, y, batch_size=4, verbose=0)
    model.predict(x, batch_size=4, verbose=0)
    model.predict(x, batch_size=8, verbose=0)
    assert strategy.describe().programs == {"fit": 1, "evaluate": 1, "predict": 2}


def test_default_strategy_has_one_replica() -> None:
    described = sg.get_strategy().describe()
    assert (described.num_replicas, described.transfers) == (1, [])


@pytest.mark.parametrize("make", _STRATEGIES.values(), ids=_STRATEGIES)
def test_notebook_shows_a_small_table(make) -> None:
    strategy = make()
    html = strategy._repr_html_()
    texts = require_plain(html).texts
    assert texts[0] == type(strategy).__name__
    assert str(strategy.num_replicas_in_sync) in texts
    assert len(html) < 2000


def test_many_devices_are_shortened() -> None:
    devices = [jax.devices("cpu")[index] for index in range(4)]
    assert "cpu:3" in sg.MirroredStrategy(devices)._repr_html_()
