"""Data that a function makes in each process that reads it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.normal(size=(40, 2)).astype("float32")


def model_of() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential([layers.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def batches_of(size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, len(X), size)]


def assert_same(model: Any, other: Any) -> None:
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def forever(batches: list[Any]) -> Iterator[Any]:
    yield from itertools.cycle(batches)


class Endless(keras.utils.PyDataset):
    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return batches_of(8)[index % 5]


KINDS: list[Callable[[list[Any]], Any]] = [list, lambda batches: (one for one in batches)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=["length known", "length unknown"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_strategy_trains_on_what_the_function_makes(kind, num_replicas) -> None:
    contexts: list[sg.InputContext] = []

    def dataset_fn(context: sg.InputContext) -> Any:
        contexts.append(context)
        return kind(batches_of(context.get_per_replica_batch_size(8)))

    alone = model_of()
    expected = alone.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    devices = [f"cpu:{i}" for i in range(num_replicas)]
    with sg.MirroredStrategy(devices).scope():
        model = model_of()
    creator = sg.DatasetCreator(dataset_fn)
    result = model.fit(creator, validation_data=creator, verbose=0).history
    assert contexts == [sg.InputContext(1, 0, num_replicas)] * 2
    np.testing.assert_allclose(result["loss"], expected.history["loss"], rtol=1e-5)
    assert_same(model, alone)
    evaluated = alone.evaluate(X, Y, batch_size=8, verbose=0)
    np.testing.assert_allclose([result["val_loss"][0], result["val_mae"][0]], evaluated, rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(creator, verbose=0), evaluated, rtol=1e-5)
    np.testing.assert_allclose(
        model.predict(sg.DatasetCreator(lambda _: [x for x, _ in batches_of(8)]), verbose=0),
        alone.predict(X, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_each_replica_has_its_own_dataset_if_that_is_asked_for() -> None:
    options = sg.InputOptions(replication_mode=sg.InputReplicationMode.PER_REPLICA)
    pipelines: list[int] = []

    def dataset_fn(context: sg.InputContext) -> Any:
        pipelines.append(context.input_pipeline_id)
        return batches_of(4)[context.input_pipeline_id :: context.num_input_pipelines]

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = model_of()
    model.fit(sg.DatasetCreator(dataset_fn, options), verbose=0)
    alone = model_of()
    alone.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert pipelines == [0, 1]
    assert_same(model, alone)


def test_data_without_end_takes_a_number_of_steps() -> None:
    creator = sg.DatasetCreator(lambda _: forever(batches_of(8)))
    with sg.OneDeviceStrategy("cpu:0").scope():
        model = model_of()
    model.fit(creator, steps_per_epoch=3, epochs=3, verbose=0)
    alone = model_of()
    alone.fit(forever(batches_of(8)), steps_per_epoch=9, shuffle=False, verbose=0)
    assert_same(model, alone)
    creator = sg.DatasetCreator(lambda _: Endless())
    for call in (
        lambda: model.fit(creator),
        lambda: model.fit(X, Y, validation_data=creator),
        lambda: model.evaluate(creator),
        lambda: model.predict(creator),
    ):
        with pytest.raises(ValueError, match="whose dataset is infinite, but no number of steps"):
            call()
    assert len(model.evaluate(creator, steps=2, verbose=0)) == 2


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"DatasetCreator received dataset_fn=\[1\] of type list"):
        sg.DatasetCreator([1])
    with pytest.raises(TypeError, match="DatasetCreator received input_options=3 of type int"):
        sg.DatasetCreator(lambda _: [], 3)
    with sg.OneDeviceStrategy("cpu:0").scope():
        model = model_of()
    for made in (None, 7):
        creator = sg.DatasetCreator(lambda _, made=made: made)
        with pytest.raises(TypeError, match="was passed as a dataset"):
            creator(sg.InputContext())
        with pytest.raises(TypeError, match="was passed as a dataset"):
            model.fit(creator)
    with pytest.raises(ValueError, match="received both a DatasetCreator and y"):
        model.fit(sg.DatasetCreator(lambda _: batches_of(8)), Y)
