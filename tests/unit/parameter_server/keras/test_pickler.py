"""Functions and models that go to another process: same names, same variables, same numbers."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest

from stratagem.parameter_server.keras.pickling import pack_object, unpack_object


class Custom(keras.Model):
    """A model that no file of Keras's own can hold without being told of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(3), {"last": keras.layers.Dense(1)}]
        self.drop = keras.layers.Dropout(0.5)
        self.factor = 2.0

    def call(self, x, training=False):
        return self.factor * self.parts[1]["last"](self.drop(self.parts[0](x), training=training))


def _sequential() -> keras.Model:
    layers = [keras.layers.Dense(3, "relu"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(1)])


def _functional() -> keras.Model:
    ids = keras.Input((4,))
    rows = keras.layers.Flatten()(keras.layers.Embedding(10, 3)(ids))
    return keras.Model(ids, keras.layers.Dense(1, kernel_regularizer="l2")(rows))


X, Y = np.arange(32.0, dtype="float32").reshape(8, 4) % 10, np.arange(8.0).reshape(8, 1)


def _moved(value: Any, known: dict[str, Any]) -> Any:
    names = {id(one): name for name, one in known.items()}
    return unpack_object(pack_object(value, lambda one: names.get(id(one))), known.__getitem__)


@pytest.mark.compatibility
@pytest.mark.parametrize("make", [_functional, Custom])
def test_model_comes_back_with_the_same_variables(make) -> None:
    model = make()
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    model.fit(X, Y, verbose=0)
    every = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    moved = _moved(model, {str(place): variable for place, variable in enumerate(every)})
    assert type(moved) is type(model)
    assert moved is not model
    assert [id(one) for one in moved.variables] == [id(one) for one in model.variables]
    assert moved.optimizer is not model.optimizer
    np.testing.assert_array_equal(moved.predict(X, verbose=0), model.predict(X, verbose=0))
    moved.fit(X, Y, verbose=0)  # which trains the variables of both
    assert int(model.optimizer.iterations) == 2
    np.testing.assert_array_equal(moved.predict(X, verbose=0), model.predict(X, verbose=0))


def test_tracked_attributes_can_still_be_changed() -> None:
    model = Custom()
    moved = _moved(model, {})
    moved.parts.append(keras.layers.Dense(2))
    moved.extra = {"more": keras.layers.Dense(2)}
    assert len(moved.layers) == len(model.layers) + 2


class _Stepping(keras.Model):
    """Of a functional model: its class becomes a Functional with the first object."""

    def test_step(self, data):
        return super().test_step(data)


def _submodels() -> keras.Model:
    inner, inputs = _functional(), keras.Input((4,))
    return _Stepping(inputs, keras.layers.Add()([inner(inputs), inner(inputs / 2.0)]))


@pytest.mark.parametrize("make", [_sequential, _functional, _submodels])
def test_model_with_variables_of_its_own_trains_and_saves_alike(make) -> None:
    """Keras finds variables, calls and tracked layers by their ids."""
    model = make()
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:1])
    model.compile(optimizer, "mse", metrics=["mae"])
    model.fit(X, Y, verbose=0)
    moved = _moved(model, {})
    assert moved.get_config() == model.get_config()
    for _ in range(2):
        assert moved.train_on_batch(X, Y) == pytest.approx(model.train_on_batch(X, Y))
    for one, other in zip(moved.variables, model.variables, strict=True):
        assert one is not other
        np.testing.assert_allclose(one.value, other.value, rtol=1e-5, atol=1e-6)
    layers = [*moved.layers]
    moved.extra = layers[-1]  # is tracked already
    assert [*moved.layers] == layers


def test_deep_graph_is_sent() -> None:
    inputs = output = keras.Input((4,))
    for _ in range(300):
        output = keras.layers.Identity()(output)
    moved = _moved(keras.Model(inputs, output), {})
    assert len(moved.layers) == 301
    np.testing.assert_array_equal(moved(X), X)


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.CategoryEncoding(num_tokens=10, output_mode="multi_hot"),
        keras.layers.Discretization(bin_boundaries=[1.0, 3.0]),
        keras.layers.Normalization(mean=2.0, variance=4.0),
        keras.layers.RandomContrast(0.5, seed=1),
        keras.layers.Rescaling(0.5),
        keras.layers.Resizing(3, 3),
    ],
    ids=lambda layer: layer.name,
)
def test_preprocessing_layers_are_sent(layer) -> None:
    of_images = isinstance(layer, keras.layers.RandomContrast | keras.layers.Resizing)
    x = np.arange(48.0, dtype="float32").reshape(1, 4, 4, 3) if of_images else X.copy()
    moved = _moved(layer, {})
    np.testing.assert_array_equal(moved(x), layer(x))


class _Delegating:
    """Asks its part for what it does not have, as a wrapper of a model does."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


class _DelegatingList(_Delegating, list[Any]):
    pass


def test_object_that_delegates_is_sent() -> None:
    moved = _moved(_Delegating(_Delegating(keras.layers.Rescaling(2.0))), {})
    assert (type(moved), type(moved.part), moved.scale) == (_Delegating, _Delegating, 2.0)
    items = _DelegatingList("part")
    items.append(3)
    moved = _moved(items, {})
    assert (type(moved), list(moved), moved.upper()) == (_DelegatingList, [3], "PART")


def test_functions_take_along_what_they_refer_to() -> None:
    model, strategy = _sequential(), object()

    def step(x: Any) -> tuple[Any, Any]:
        return strategy, model(x)

    moved = _moved(step, {"strategy": strategy})
    own, output = moved(X)
    assert own is strategy
    np.testing.assert_array_equal(output, model(X))


def test_what_cannot_leave_the_process_is_reported() -> None:
    lock = threading.Lock()

    def step() -> Any:
        return lock

    with pytest.raises(TypeError, match=r"step.*cannot be sent to a worker: cannot pickle"):
        pack_object(step, lambda _: None)


def test_plain_values_need_no_names_and_what_is_known_is_found_among_them() -> None:
    def refuse(one: Any) -> None:
        raise AssertionError(one)

    value = {"a": (1, 2.5, None, "text"), "b": [np.arange(3), np.float32(0.5), b"bytes"]}
    got = unpack_object(pack_object(value, refuse), refuse)
    assert got["a"] == value["a"]
    np.testing.assert_array_equal(got["b"][0], [0, 1, 2])
    assert (got["b"][1], type(got["b"][1]), got["b"][2]) == (0.5, np.float32, b"bytes")
    known: Any = object()
    own: list[Any] = [1]
    own.append(own)  # holds itself
    got = _moved([[[[[[known]]]]], np.array([known], object), own], {"it": known})
    assert got[0][0][0][0][0][0] is got[1][0] is known
    assert (got[2][0], got[2][1] is got[2]) == (1, True)
