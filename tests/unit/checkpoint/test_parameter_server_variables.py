"""Sharded variables restore with any number of shards, or none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.parameter_server.clusters import local_strategy

NUM_ROWS = 41
WAYS = ["one device", 1, 2, 5]  # or the number of shards on two servers


@contextlib.contextmanager
def placed(way: Any) -> Iterator[Any]:
    """The scope in which to build a model."""
    if way == "one device":
        yield contextlib.nullcontext
        return
    partitioner = sg.partitioners.FixedShardsPartitioner(way)
    with local_strategy(num_servers=2, variable_partitioner=partitioner) as strategy:
        yield strategy.scope


def build(scope: Any, num_rows: int = NUM_ROWS) -> keras.Model:
    """A model and an optimizer with slots, all with distinct values."""
    layers = keras.layers
    with scope():
        model = keras.Sequential(
            [
                layers.Input((3,), dtype="int32"),
                layers.Embedding(num_rows, 4, name="table"),
                layers.Flatten(name="flat"),
                layers.BatchNormalization(name="normal"),
                layers.Dense(2, name="head"),
            ],
            name="model",
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.optimizer.build(model.trainable_variables)
    generator = np.random.default_rng()
    for variable in state(model):
        variable.assign(generator.uniform(1, 2, variable.shape))
    return model


def state(model: keras.Model) -> list[Any]:
    slots = [one for one in model.optimizer.variables if one.shape]
    return [*model.weights, *slots]


def values(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(variable.value) for variable in state(model)]


def num_shards(variable: Any) -> int:
    return len(variable) if isinstance(variable, sg.ShardedVariable) else 1


@pytest.mark.slow
@pytest.mark.parametrize("first", WAYS)
def test_saved_in_some_shards_and_restored_in_others(first: Any, tmp_path: Path) -> None:
    with placed(first) as scope:
        model = build(scope)
        expected = values(model)
        path = sg.train.Checkpoint(model=model).save(tmp_path / "ckpt")
        model.save_weights(tmp_path / "model.weights.h5")
    for second in WAYS:
        with placed(second) as scope:
            other = build(scope)
            table = other.get_layer("table").embeddings
            assert num_shards(table) == (1 if second == "one device" else second)
            sg.train.Checkpoint(model=other).restore(path)
            for one, two in zip(values(other), expected, strict=True):
                np.testing.assert_array_equal(one, two)
            own = build(scope)
            own.load_weights(tmp_path / "model.weights.h5")
            for one, two in zip(values(own), expected, strict=False):
                np.testing.assert_array_equal(one, two)


def test_single_variable_is_saved_and_restored_in_other_shards(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(7, 2)).astype("float32")
    with placed(3) as scope, scope():
        path = sg.train.Checkpoint(rows=sg.Variable(rows)).save(tmp_path / "ckpt")
    plain = keras.Variable(np.zeros((7, 2), "float32"))
    listed = sg.ShardedVariable([keras.Variable(np.zeros((n, 2), "float32")) for n in (1, 6)])
    with placed(2) as scope, scope():
        for other in (plain, listed, sg.Variable(np.zeros((7, 2), "float32"))):
            sg.train.Checkpoint(rows=other).restore(path)
            np.testing.assert_array_equal(np.asarray(other), rows)


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, "one device"), ("one device", 2)])
def test_another_number_of_rows_is_refused(first: Any, second: Any, tmp_path: Path) -> None:
    with placed(first) as scope:
        model = build(scope)
        path = sg.train.Checkpoint(model=model).save(tmp_path / "ckpt")
        model.save_weights(tmp_path / "model.weights.h5")
    with placed(second) as scope:
        other = build(scope, NUM_ROWS - 1)
        before = values(other)
        told = r"model/.*table/embeddings.* has shape \(40, 4\) here but \(41, 4\) in"
        with pytest.raises(ValueError, match=told):
            sg.train.Checkpoint(model=other).restore(path)
        for one, two in zip(values(other), before, strict=True):
            np.testing.assert_array_equal(one, two)
        with pytest.raises(ValueError, match="table") as raised:
            other.load_weights(tmp_path / "model.weights.h5")
        assert {"(40, 4)", "(41, 4)"} <= set(re.findall(r"\(\d+, \d+\)", str(raised.value)))


@pytest.mark.slow
def test_model_that_is_built_after_the_restore(tmp_path: Path) -> None:
    """By `build`, with its optimizer, and by `fit`; the table is in shards on the servers."""
    with placed("one device") as scope:
        model = build(scope)
        model.optimizer.learning_rate.assign(0.0)
        expected = values(model)
        path = sg.train.Checkpoint(model=model).save(tmp_path / "ckpt")
    rows = np.zeros((4, 3), "int32")

    def make() -> keras.Model:
        with scope():
            layers = keras.layers
            first = [layers.Embedding(NUM_ROWS, 4), layers.Flatten()]
            other = keras.Sequential([*first, layers.BatchNormalization(), layers.Dense(2)])
            other.compile(keras.optimizers.Adam(0.01), "mse")
        return other

    with placed(5) as scope:
        other = make()
        status = sg.train.Checkpoint(model=other).restore(path)
        with scope():
            other.build((None, 3))
        status.assert_consumed()
        assert num_shards(other.layers[0].embeddings) == 5
        for one, two in zip(values(other), expected, strict=True):
            np.testing.assert_array_equal(one, two)

        other = make()
        status = sg.train.Checkpoint(model=other).restore(path)
        other.fit(rows, np.zeros((4, 2)), batch_size=4, verbose=0)
        status.assert_consumed()
        for one, two in zip(other.trainable_variables, model.trainable_variables, strict=True):
            np.testing.assert_array_equal(np.asarray(one), two.value)
        assert int(other.optimizer.iterations) == int(model.optimizer.iterations) + 1
