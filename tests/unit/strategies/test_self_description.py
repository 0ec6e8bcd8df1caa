"""`describe`: places and bytes of variables, compared with the arrays on the devices."""

from __future__ import annotations

import collections
import copy
import json

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import mirrored
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
        model = _model()
        total = sg.Variable(0.0, synchronization="on_read", aggregation="sum", name="total")
    places = {one.path: one.place for one in strategy.describe().variables}
    assert places[model.layers[0].kernel.path] == kernel
    assert next(place for path, place in places.items() if path.endswith("kernel_momentum")) == slot
    if name == "mirrored":
        assert places[total.path] == "value per replica"


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
    nothing = sg.OneDeviceStrategy("cpu:0").describe()
    assert (nothing.num_replicas, "none" in str(nothing)) == (1, True)


def test_notebook_shows_a_small_table() -> None:
    html = _STRATEGIES["mirrored"]()._repr_html_()
    texts = require_plain(html).texts
    assert texts[0] == "MirroredStrategy"
    assert "4" in texts
    assert "cpu:3" in html
    assert len(html) < 2000


# What distribute_dataset, distribute_datasets_from_function and run_steps refuse.

_PER_REPLICA = sg.InputOptions(replication_mode=sg.InputReplicationMode.PER_REPLICA)


def _iterator(strategy: sg.Strategy) -> sg.DistributedIterator:
    return iter(strategy.distribute_dataset([np.zeros(2)]))


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        ([np.zeros(2)], _PER_REPLICA, NotImplementedError, "call distribute_datasets_from_func"),
        (mirrored(2).distribute_dataset([np.zeros(2)]), None, TypeError, "that is distributed"),
        ([np.zeros(2)], {"buffer": 1}, TypeError, "options={'buffer': 1} is of type dict"),
        (3, None, TypeError, "3 of type int was passed as a dataset"),
        (np.zeros((2, 2)), None, ValueError, "Unbatched arrays were passed as a dataset"),
    ],
)
def test_dataset_that_cannot_be_distributed_is_refused(dataset, options, error, message) -> None:
    with pytest.raises(error, match=message):
        mirrored(2).distribute_dataset(dataset, options)
    for dataset_fn in ([1], lambda _: None):
        with pytest.raises(TypeError, match=r"of type list|dataset_fn returned None"):
            mirrored(2).distribute_datasets_from_function(dataset_fn)


def test_datasets_are_not_made_in_a_replica_function() -> None:
    strategy = mirrored(2)
    for wrong in (
        lambda: strategy.distribute_dataset([np.zeros(2)]),
        lambda: strategy.distribute_datasets_from_function(lambda _: [np.zeros(2)]),
        lambda: strategy.run_steps(np.sum, _iterator(strategy), 1),
    ):
        with pytest.raises(RuntimeError, match="cross-replica context"):
            strategy.run(wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"fn": 3}, TypeError, "run_steps received fn=3 of type int"),
        ({"iterator": [1]}, TypeError, r"received iterator=\[1\] of type list"),
        ({"num_steps": 1.5}, TypeError, "received num_steps=1.5 of type float"),
        ({"num_steps": True}, TypeError, "received num_steps=True of type bool"),
        ({"num_steps": 0}, ValueError, "received num_steps=0"),
        ({"iterator": _iterator(mirrored(3))}, ValueError, "received an iterator of Mirrored"),
        ({"reduce": "max"}, ValueError, "is not a reduction"),
    ],
)
def test_steps_that_cannot_be_run_are_refused(wrong, error, message) -> None:
    strategy = mirrored(2)
    call = {"fn": np.sum, "iterator": _iterator(strategy), "num_steps": 1, **wrong}
    with pytest.raises(error, match=message):
        strategy.run_steps(**call)


# A strategy records its constructor call, so that another process can repeat it.


def test_strategy_is_recreated_with_its_arguments() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=sg.RingAllReduce())
    assert strategy.recreate is not None
    again = strategy.recreate()
    assert again is not strategy
    assert repr(again) == repr(strategy)
    assert type(again.cross_device_ops) is sg.RingAllReduce
    copied = copy.deepcopy(strategy)
    assert copied.recreate().num_replicas_in_sync == 2
    assert sg.get_strategy().recreate is None


# A strategy in a task that does not train is an error at every entry, and names the task.


@pytest.fixture
def strategy_of_non_training(monkeypatch) -> sg.ParameterServerStrategy:
    jobs = ("chief", "ps", "worker")
    cluster = {job: [f"127.0.0.1:{port}"] for port, job in enumerate(jobs, start=1)}
    text = json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}})
    monkeypatch.setenv("TF_CONFIG", text)
    return sg.ParameterServerStrategy()


def test_every_entry_is_refused(strategy_of_non_training) -> None:
    message = "was used in ps 0, which does not train"
    batches = iter(strategy_of_non_training.distribute_dataset([np.arange(2)]))
    with pytest.raises(RuntimeError, match=message), strategy_of_non_training.scope():
        pass
    with pytest.raises(RuntimeError, match=message):
        strategy_of_non_training.run(lambda: 1)
    with pytest.raises(RuntimeError, match=message):
        strategy_of_non_training.run_steps(np.sum, batches, 1)
    with pytest.raises(RuntimeError, match=message):
        sg.coordinator.ClusterCoordinator(strategy_of_non_training)
    assert sg.get_strategy() is not strategy_of_non_training
