"""fit, evaluate and predict on data that each worker makes, beside one device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.training.datasets import adapted
from stratagem.parameter_server.server.shards import UpdateMode
from stratagem.parameter_server.strategy import make_worker
from tests.unit.parameter_server.clusters import local_strategy
from tests.unit.parameter_server.keras.trained_models import assert_same
from tests.unit.parameter_server.server.update_rules import num_discarded
from tests.unit.parameter_server.shared_with_workers import (
    LIMIT_S,
    forget,
    go_on,
    started,
    wait_to_go_on,
)

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(44, 6)).astype("float32")
Y = RNG.normal(size=(44, 2)).astype("float32")


class Reopened:
    """An iterable that does not know its length."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches


class Endless(keras.utils.PyDataset):
    """Batches again and again."""

    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return _batches()[index % 6]


def _batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Six of 8 rows, the last of 4."""
    return [(X[i : i + 8], Y[i : i + 8]) for i in range(0, len(X), 8)]


def sharing(kind: Callable[[list[Any]], Any] = list, part: Any = None) -> sg.DatasetCreator:
    """Worker k of n gets batches k, k + n, ...: of two workers three each, of four 2, 2, 1, 1."""

    def dataset_fn(context: sg.InputContext) -> Any:
        own = _batches()[context.input_pipeline_id :: context.num_input_pipelines]
        return kind([one if part is None else one[part] for one in own])

    return sg.DatasetCreator(dataset_fn)


def model_of(*, is_built: bool = True, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    first = [layers.Input((6,))] if is_built else []
    model = keras.Sequential([*first, layers.Dense(5, "tanh"), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **options)
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (list, {"is_built": False}),
        (Reopened, {"steps_per_execution": 4}),
        (Reopened, {"is_built": False}),
    ],
)
def test_one_worker_trains_as_one_device_does(kind, options) -> None:
    alone = model_of()
    expected = alone.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    with local_strategy() as strategy:
        with strategy.scope():
            model = model_of(**options)
        result = model.fit(sharing(kind), epochs=2, verbose=0).history
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5)
        assert_same(model.weights, alone.weights, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_workers"), [(Reopened, 2), (list, 4)])
def test_each_example_is_read_once(kind, num_workers) -> None:
    with local_strategy(num_workers) as strategy:
        with strategy.scope():
            model = model_of(steps_per_execution=2)
        alone = model_of()
        expected = alone.evaluate(X, Y, batch_size=8, verbose=0)
        for _ in range(2):
            np.testing.assert_allclose(
                model.evaluate(sharing(kind), verbose=0), expected, rtol=1e-5
            )
        # In turn: batches 0, 1, 2 ... as these are shared out.
        predicted = model.predict(sharing(kind, part=0), verbose=0)
        np.testing.assert_allclose(predicted, alone.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
        result = model.fit(
            sharing(kind), validation_data=sharing(kind), epochs=2, verbose=0
        ).history
        assert int(model.optimizer.iterations) == 12
        assert result["loss"][1] < result["loss"][0]
        np.testing.assert_allclose(
            [result["val_loss"][1], result["val_mae"][1]],
            model.evaluate(X, Y, verbose=0),
            rtol=1e-5,
        )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [(list, {}), (Reopened, {"steps_per_execution": 2})])
def test_synchronous_workers_make_a_step_of_a_batch_of_each(kind, options) -> None:
    """Of three: two steps of three batches, of which the last one is a half."""
    alone = model_of()
    whole = _batches()
    halves = [
        [np.concatenate([rows[place] for rows in part]) for place in range(2)]
        for part in (whole[:3], whole[3:])
    ]
    with local_strategy(3, mode=UpdateMode(num_needed=3)) as strategy:
        with strategy.scope():
            model = model_of(**options)
        model.fit(sharing(kind), verbose=0)
        assert int(model.optimizer.iterations) == 2
        assert num_discarded(strategy.placement.remote.variables.client) == 0
        # Each batch counts a third, also the one of 4 rows.
        weights = [np.ones(24), np.repeat([20 / 24, 20 / 24, 20 / 12], [8, 8, 4])]
        for (x, y), weight in zip(halves, weights, strict=True):
            alone.train_on_batch(x, y, sample_weight=weight.astype("float32"))
        assert_same(model.weights, alone.weights, rtol=1e-5)


@pytest.mark.slow
def test_synchronous_workers_go_on_when_one_has_no_more_data() -> None:
    """Of four with 2, 2, 1 and 1 batches: the second step is that of the first two."""
    alone = model_of()
    whole = _batches()
    for part, count in ((whole[:4], 32), (whole[4:], 12)):
        x, y = (np.concatenate([rows[place] for rows in part]) for place in range(2))
        rows = [len(one[0]) for one in part]
        weight = np.repeat([count / len(rows) / one for one in rows], rows)
        alone.train_on_batch(x, y, sample_weight=weight.astype("float32"))
    with local_strategy(4, mode=UpdateMode(num_needed=4)) as strategy:
        with strategy.scope():
            model = model_of()
        result = model.fit(sharing(), verbose=0).history
        assert int(model.optimizer.iterations) == 2
        assert strategy.executor.coordinator.stalls.num_stalls == 0
        assert_same(model.weights, alone.weights, rtol=1e-5)
        assert result["loss"][0] > 0
        empty = sg.DatasetCreator(lambda context: _batches()[: context.input_pipeline_id])
        with pytest.raises(ValueError, match="The dataset of worker 0 is empty"):
            model.fit(empty, verbose=0)


def test_data_without_end_is_read_for_as_many_steps() -> None:
    creator = sg.DatasetCreator(lambda _: Endless())
    with local_strategy(2) as strategy:
        with strategy.scope():
            model = model_of()
        for call in (model.fit, model.evaluate, model.predict):
            with pytest.raises(ValueError, match="whose dataset is infinite"):
                call(creator, verbose=0)
        model.fit(creator, steps_per_epoch=5, epochs=3, verbose=0)
        assert int(model.optimizer.iterations) == 15
        assert len(model.evaluate(creator, steps=2, verbose=0)) == 2


def test_each_worker_learns_which_part_is_its_own() -> None:
    def dataset_fn(context: sg.InputContext) -> Any:
        numbers = context.num_input_pipelines, context.input_pipeline_id
        return [np.float32([[*numbers, context.num_replicas_in_sync]] * 2)]  # of one replica

    for mode, num_in_sync in ((UpdateMode(), 2), (UpdateMode(num_needed=2), 4)):
        with local_strategy(2, devices_per_worker=2, mode=mode) as strategy:
            with strategy.scope():
                layers = [keras.layers.Input((3,)), keras.layers.Dense(3, use_bias=False)]
                model = keras.Sequential(layers)
                model.set_weights([np.eye(3, dtype="float32")])
            result = model.predict(sg.DatasetCreator(dataset_fn), verbose=0)
            assert result.tolist() == [[2, 0, num_in_sync]] * 2 + [[2, 1, num_in_sync]] * 2


def test_example_is_counted_once_though_its_worker_is_lost() -> None:
    """A worker is lost when it has read one of its batches, and another process takes its place."""
    forget()

    class Waiting(Reopened):
        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(super().__iter__()):
                if number == 2:
                    wait_to_go_on()
                yield batch

    def dataset_fn(context: sg.InputContext) -> Any:
        own = _batches()[context.input_pipeline_id :: context.num_input_pipelines]
        return Waiting(own) if context.input_pipeline_id == 0 else Reopened(own)

    with local_strategy(2) as strategy:
        with strategy.scope():
            model = model_of()
        expected = model.evaluate(X, Y, verbose=0)
        result: list[Any] = []
        thread = threading.Thread(
            target=lambda: result.append(model.evaluate(sg.DatasetCreator(dataset_fn), verbose=0))
        )
        thread.start()
        assert started.acquire(timeout=LIMIT_S)
        workers = strategy.executor.coordinator.workers
        with contextlib.closing(make_worker(strategy.cluster.keys, devices=["cpu:0"])) as other:
            workers.on_lost(0, "it died")
            workers.on_returned(0, other.address)
            assert started.acquire(timeout=LIMIT_S)  # the other one has come as far
            go_on.set()
            thread.join(LIMIT_S)
            np.testing.assert_allclose(result, [expected], rtol=1e-5)


@pytest.mark.parametrize("made", [None, 7])
def test_function_that_makes_no_dataset_is_reported(made) -> None:
    with local_strategy(2) as strategy:
        with strategy.scope():
            model = model_of()
        with pytest.raises(TypeError, match="was passed as a dataset"):
            model.fit(sg.DatasetCreator(lambda _: made), verbose=0)


def test_batches_themselves_are_there_for_who_knows_no_tickets() -> None:
    """Such as BackupAndRestore, which counts what is read."""
    with local_strategy(2) as strategy:
        data = adapted(strategy, "evaluate", {"x": sharing(Reopened)})["x"]
        for _ in range(2):
            first = next(iter(data.get_jax_iterator()))  # as Keras does to build a model
            np.testing.assert_array_equal(first[0], X[:8])
            read = [batch[0] for batch in data.get_jax_iterator()]
            np.testing.assert_array_equal(np.concatenate(read), X)


@pytest.mark.slow
def test_backup_of_fit_reads_the_same_data(tmp_path) -> None:
    """It follows the batches, and so has them sent through the coordinator."""
    alone = model_of()
    alone.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    with local_strategy() as strategy:
        with strategy.scope():
            model = model_of()
        backup = sg.BackupAndRestore(tmp_path)
        model.fit(sharing(), epochs=2, verbose=0, callbacks=[backup])
        assert_same(model.weights, alone.weights, rtol=1e-5)
