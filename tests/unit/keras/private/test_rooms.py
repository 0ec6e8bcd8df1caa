"""Private names of Keras, compared with what Keras does in public."""

from __future__ import annotations

import jax
import keras
import numpy as np

import stratagem.keras.private as package
from stratagem.keras.private import (
    access,
    graphs,
    iterators,
    optimizers,
    process_state,
    trainers,
    variables,
)


def _model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def test_an_open_object_is_the_object() -> None:
    model = _model()
    assert access.as_open(model) is model


def test_metrics_are_unbuilt_until_a_batch_is_known() -> None:
    model = _model()
    assert trainers.has_unbuilt_metrics(model)
    spec = keras.KerasTensor((4, 2), "float32")
    trainers.build_metrics(model, keras.KerasTensor((4, 3), "float32"), spec, spec, None)
    assert not trainers.has_unbuilt_metrics(model)
    assert list(trainers.named_metrics(model)) == ["mae"]


def test_first_batch_is_that_of_the_epoch() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    epoch = package.JAXEpochIterator(x=x, y=-x, batch_size=2, shuffle=False)
    for array, expected in zip(iterators.first_batch(epoch), (x, -x), strict=True):
        np.testing.assert_array_equal(array, expected[:2])
    assert iterators.first_batch([]) is None


def test_gradients_are_clipped_as_by_the_optimizer() -> None:
    optimizer = keras.optimizers.SGD(clipvalue=1.0)
    (clipped,) = optimizers.clip_gradients(optimizer, [keras.ops.array([-3.0, 0.5, 2.0])])
    np.testing.assert_array_equal(clipped, [-1.0, 0.5, 1.0])


def test_seed_and_names_are_restored() -> None:
    keras.utils.set_random_seed(3)
    keras.random.uniform((1,))  # creates the default generator
    before = process_state.global_seed_state()
    drawn = np.asarray(keras.random.uniform((2,)))
    process_state.set_global_seed_state(before)
    np.testing.assert_array_equal(keras.random.uniform((2,)), drawn)
    name = keras.layers.Dense(1).name
    with process_state.fresh_names():
        assert keras.layers.Dense(1).name == "dense"
    assert keras.layers.Dense(1).name != name


def test_layers_of_a_model_are_listed_flat() -> None:
    model = _model()
    assert model.get_layer("dense") in variables.flatten_layers(model)


def test_calls_of_a_graph_are_those_of_its_layers_in_order() -> None:
    first = keras.Input((3,))
    dense = keras.layers.Dense(3, name="dense")
    hidden = dense(first)
    outputs = keras.layers.Add(name="add")([first, dense(hidden)])
    graph = graphs.graph_of(keras.Model(first, outputs))
    calls = graphs.graph_calls(graph)
    assert [call.operation.name for call in calls] == ["dense", "dense", "add"]
    assert [len(call.tensors) for call in calls] == [1, 1, 2]
    assert calls[1].tensors[0] is calls[0].outputs[0]
    assert graphs.graph_output_ids(graph) == {id(calls[2].outputs[0])}
    assert graphs.graph_of(dense) is None
    assert graphs.graph_of(_model()) is not None


def test_masks_of_earlier_traces_are_forgotten_in_a_step() -> None:
    def step(x: jax.Array) -> jax.Array:
        package.set_keras_mask(x, x > 0)
        with process_state.fresh_masks():
            assert package.get_keras_mask(x) is None
            package.set_keras_mask(x, x < 0)
        return package.get_keras_mask(x)

    np.testing.assert_array_equal(jax.jit(step)(np.array([-1.0, 1.0])), [False, True])
