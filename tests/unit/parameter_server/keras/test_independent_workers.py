"""Workers with programs of their own on the same parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.connection import ServerError
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.client.variable_client import Stored
from stratagem.parameter_server.cluster_plan import RemoteStateStrategy
from stratagem.parameter_server.keras.pickling import KerasPacking
from stratagem.parameter_server.keras.worker_data import BatchAssignment, WorkerBatches
from stratagem.parameter_server.server.shards import UpdateMode
from stratagem.parameter_server.strategy import independent_parts, worker_parts
from tests.unit.parameter_server.clusters import OneThatDies, ThreadCluster, local_strategy
from tests.unit.parameter_server.keras.trained_models import assert_same

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 6)).astype("float32")
Y = RNG.normal(size=(64, 2)).astype("float32")
FIT: dict[str, Any] = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


class Shared(ThreadCluster):
    """Servers that outlive the strategies."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


@pytest.fixture
def cluster() -> Iterator[Shared]:
    made = Shared(2, [])
    yield made
    made.end()


@contextlib.contextmanager
def worker(
    cluster: Shared, index: int, num_devices: int = 1, **options: Any
) -> Iterator[RemoteStateStrategy]:
    partitioner = sg.partitioners.FixedShardsPartitioner(2)
    devices = [f"cpu:{place}" for place in range(num_devices)]
    mode, num_workers = options.pop("mode", UpdateMode()), options.pop("num_workers", 1)
    parts = independent_parts(cluster, index, num_workers, partitioner, mode, devices, **options)
    with contextlib.closing(RemoteStateStrategy(parts)) as made:
        yield made


def model(seed: int, optimizer: Any = None) -> keras.Model:
    """One whose variables have the same names each time, as in another process."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    hidden = [layers.Dense(5, "tanh", name="hidden"), layers.BatchNormalization(name="normal")]
    parts = [layers.Input((6,)), *hidden, layers.Dense(2, name="out")]
    made = keras.Sequential(parts, name="model")
    made.compile(optimizer or keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return made


def weights(of: keras.Model) -> list[np.ndarray]:
    return [np.asarray(one.value) for one in of.variables]


@pytest.mark.slow
def test_one_worker_trains_as_one_device_does(cluster) -> None:
    alone = model(3)
    expected = alone.fit(X, Y, validation_data=(X[:20], Y[:20]), **FIT).history
    predicted = alone.predict(X, verbose=0)
    with worker(cluster, 0) as strategy, strategy.scope():
        served = model(3)
        history = served.fit(X, Y, validation_data=(X[:20], Y[:20]), **FIT).history
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-4, err_msg=name)
        assert_same(served.variables, alone.variables)
        assert int(served.optimizer.iterations) == int(alone.optimizer.iterations) == 8
        got = served.predict(X, verbose=0)
        np.testing.assert_allclose(got, predicted, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_workers_find_what_others_have_made_and_learned(cluster) -> None:
    with worker(cluster, 0) as first, worker(cluster, 1, num_devices=2) as second:
        with first.scope():
            one = model(3)
        with second.scope():
            other = model(4)  # its own initial values would be others
        for left, right in zip(weights(one), weights(other), strict=True):
            np.testing.assert_array_equal(left, right)
        loss = one.evaluate(X, Y, verbose=0)[0]
        one.fit(X, Y, **FIT)
        other.fit(X, Y, **FIT)
        assert int(one.optimizer.iterations) == int(other.optimizer.iterations) == 16
        for left, right in zip(weights(one), weights(other), strict=True):
            np.testing.assert_array_equal(left, right)
        assert one.evaluate(X, Y, verbose=0)[0] < loss
        assert (
            sum(second.placement.remote.variables.client.staleness().values()) == 2 * 16
        )  # of two servers


def test_loop_of_ones_own_trains_on_the_servers(cluster) -> None:
    with worker(cluster, 0, num_devices=2) as strategy:
        with pytest.raises(RuntimeError, match="omit independent=True"):
            sg.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            variable = sg.Variable(np.zeros(3, "float32"))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([variable])

        def step(gradient: Any) -> None:
            optimizer.apply([gradient], [variable])

        for _ in range(3):
            strategy.run(step, args=(np.float32([1, 2, 3]),))
        np.testing.assert_array_equal(variable.value, [-6, -12, -18])  # of two replicas
        assert int(optimizer.iterations) == 3


@pytest.mark.slow
def test_other_optimizer_of_the_same_variables_is_refused(cluster) -> None:
    with worker(cluster, 0) as first, worker(cluster, 1) as second:
        with first.scope():
            model(3, keras.optimizers.SGD(0.1)).fit(X, Y, **FIT)
        with second.scope(), pytest.raises(ServerError, match="use the optimizer of the journal"):
            model(3, keras.optimizers.SGD(0.2)).fit(X, Y, **FIT)


def test_lost_updates_are_reported_once_for_each_number(tmp_path) -> None:
    cluster: Any = OneThatDies(tmp_path)
    with worker(cluster, 1) as strategy:
        with strategy.scope():
            variable = sg.Variable(np.zeros(2, "float32"))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([variable])

        def step() -> Any:
            optimizer.apply([np.float32([1, 2])], [variable])
            return variable.value

        strategy.run(step)
        strategy.placement.remote.variables.secure()
        for num_lost, in_all in ((2, 2), (1, 3)):
            for _ in range(num_lost):
                strategy.run(step)
            cluster.server.restart()
            told = f"worker 1 has seen that {in_all} updates were lost in all"
            with pytest.warns(RuntimeWarning, match=told):
                strategy.run(step)
            strategy.placement.remote.variables.secure()
            strategy.run(step)  # which says nothing more
            strategy.placement.remote.variables.secure()
        np.testing.assert_array_equal(variable.value, [-5, -10])


@pytest.mark.parametrize(
    ("mode", "num_in_sync"),
    [(UpdateMode(), 2), pytest.param(UpdateMode(3), 6, marks=pytest.mark.slow)],
)
def test_each_worker_makes_its_own_part_of_the_data(cluster, mode, num_in_sync) -> None:
    contexts: list[sg.InputContext] = []

    def dataset_fn(context: sg.InputContext) -> Any:
        contexts.append(context)
        return [(X[:8], Y[:8])]

    for index in (0, 2):
        with worker(cluster, index, 2, mode=mode, num_workers=3) as strategy:
            with strategy.scope():
                made = model(3)
            made.evaluate(sg.DatasetCreator(dataset_fn), verbose=0)
    assert contexts == [sg.InputContext(3, index, num_in_sync) for index in (0, 2)]


# Batches of a worker by their number.


def _made(count: int = 5) -> WorkerBatches:
    strategy = sg.OneDeviceStrategy("cpu:0")
    batches = [np.full(2, number) for number in range(count)]
    return WorkerBatches(lambda: strategy.distribute_datasets_from_function(lambda _: batches))


def _numbers(batches: list[Any]) -> list[int]:
    return [int(batch.whole()[0]) for batch in batches]


def test_last_batch_comes_again_where_others_wait() -> None:
    made = _made()
    assert _numbers(made.take(BatchAssignment(0, 0, 3, 2, (0.5, 0.5, 0.0)))) == [3, 4, 4]
    assert _numbers(made.take(BatchAssignment(0, 0, 5, 0, (0.0, 0.0)))) == [4, 4]
    assert _numbers(_made().take(BatchAssignment(0, 0, 5, 0, (0.0,)))) == [4]  # in a new process
    with pytest.raises(RuntimeError, match="of worker 1 ended after 3 batches, but had"):
        _made(3).take(BatchAssignment(1, 0, 2, 2))


# What workers have of variables that are on servers.


@pytest.mark.compatibility
def test_worker_knows_a_table_that_it_has_no_room_for() -> None:
    shape = (10**12, 8)  # 32 TB
    with local_strategy(num_servers=1) as strategy:
        with strategy.scope():
            small = keras.Variable(np.zeros((3, 8), "float32"), name="table")
        packing = KerasPacking()
        kind, described, _, has_rows, _ = packing._name_of(small, strategy, set())
        placement = ShardLayout("large", shape, "float32", (0,), (shape[0],), has_rows=True)
        variables = strategy.placement.remote.variables
        worker = RemoteStateStrategy(worker_parts(variables.client, 0, variables.mode))
        name = (kind, {**described, "shape": shape}, Stored("large"), has_rows, placement)
        large = packing._object_of(name, worker)
    assert large.shape == shape
    assert large.place == Stored("large")
    assert packing._object_of(name, worker) is large
