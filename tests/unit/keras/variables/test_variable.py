"""What a Keras variable becomes in a strategy's scope, and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.variables.registry import VariableKind
from tests.parity.comparison import mirrored
from tests.unit.keras.replicas import components_of, copies_of, kind_of

PLAIN, MIRRORED, ON_READ = VariableKind.PLAIN, VariableKind.MIRRORED, VariableKind.ON_READ


def _dense_kernel() -> Any:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    return layer.kernel


def _moving_mean() -> Any:
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    return layer.moving_mean


def _momentum() -> Any:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([_dense_kernel()])
    return optimizer.variables[-1]


# What makes the variable, its kind under several replicas, its aggregation there.
_VARIABLES: dict[str, tuple[Callable[[], Any], VariableKind, str]] = {
    "layer": (_dense_kernel, MIRRORED, "none"),
    "moving_mean": (_moving_mean, ON_READ, "mean"),
    "metric": (lambda: keras.metrics.Mean().total, ON_READ, "sum"),
    "integer_metric": (lambda: _Hits().hits, ON_READ, "sum"),
    "iterations": (lambda: keras.optimizers.SGD().iterations, MIRRORED, "only_first_replica"),
    "momentum": (_momentum, MIRRORED, "none"),
    "seed": (lambda: keras.random.SeedGenerator(3).state, MIRRORED, "none"),
    "keras_variable": (lambda: keras.Variable(1.0), MIRRORED, "none"),
    "on_write": (lambda: sg.Variable(1.0, synchronization="on_write"), MIRRORED, "none"),
    "on_read": (
        lambda: sg.Variable(
            1.0,
            synchronization=sg.VariableSynchronization.ON_READ,
            aggregation=sg.VariableAggregation.MEAN,
        ),
        ON_READ,
        "mean",
    ),
}


class _Hits(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="hits")
        self.hits = self.add_variable((), "zeros", dtype="int32", name="hits")


@pytest.mark.compatibility
@pytest.mark.parametrize("name", _VARIABLES)
def test_kind_of_variable_under_several_replicas(name: str) -> None:
    make, kind, aggregation = _VARIABLES[name]
    strategy = mirrored(2)
    with strategy.scope():
        variable = make()
    assert (kind_of(variable), variable.aggregation) == (kind, aggregation)
    assert variable.distribute_strategy is strategy
    copy_shape = (1, *variable.shape) if kind is ON_READ else tuple(variable.shape)
    assert [copy.shape for copy in copies_of(variable)] == [copy_shape] * 2


@pytest.mark.compatibility
@pytest.mark.parametrize("name", _VARIABLES)
def test_kind_of_variable_with_one_replica_and_without_a_strategy(name: str) -> None:
    make, _, _ = _VARIABLES[name]
    with sg.OneDeviceStrategy("cpu:1").scope():
        on_one_device = make()
    assert kind_of(on_one_device) is PLAIN
    assert [device.id for device in on_one_device.storage.devices()] == [1]
    outside = make()
    assert kind_of(outside) is None
    assert type(outside) is keras.Variable


@pytest.mark.compatibility
def test_variable_takes_the_arguments_of_tensorflow_in_its_order() -> None:
    with mirrored(2).scope():
        variable = sg.Variable(lambda: [1.0, 2.0], False, "weights", "float16", "on_write", "sum")
    assert (variable.trainable, variable.name, variable.dtype) == (False, "weights", "float16")
    assert (variable.synchronization, variable.aggregation) == ("on_write", "sum")
    np.testing.assert_array_equal(np.asarray(variable), [1.0, 2.0])


@pytest.mark.compatibility
def test_dtype_of_variable_is_that_of_its_value() -> None:
    with mirrored(2).scope():
        dtypes = [
            sg.Variable(value).dtype for value in (3, 1.5, True, np.ones(2, "int8"), np.float16(2))
        ]
    assert dtypes == ["int32", "float32", "bool", "int8", "float16"]


@pytest.mark.compatibility
def test_variable_made_from_another_variable_has_its_value() -> None:
    with mirrored(2).scope():
        first = sg.Variable([1.0, 2.0])
        second = keras.Variable(first)
    first.assign([5.0, 5.0])
    np.testing.assert_array_equal(np.asarray(second), [1.0, 2.0])


@pytest.mark.compatibility
def test_random_initial_value_is_the_same_on_all_copies_and_as_on_one_device() -> None:
    def kernel() -> Any:
        keras.utils.set_random_seed(5)
        layer = keras.layers.Dense(4)
        layer.build((None, 3))
        return layer.kernel

    with mirrored(3).scope():
        distributed = kernel()
    expected = np.asarray(kernel())
    assert np.ptp(expected) > 0
    for copy in copies_of(distributed):
        np.testing.assert_array_equal(copy, expected)


@pytest.mark.compatibility
def test_each_component_of_on_read_starts_with_the_whole_value() -> None:
    with mirrored(3).scope():
        variable = sg.Variable(2.0, synchronization="on_read", aggregation="sum")
    assert components_of(variable) == [2.0, 2.0, 2.0]


def test_variable_that_could_not_be_made_leaves_nothing_behind() -> None:
    strategy = mirrored(2)
    with strategy.scope(), pytest.raises(ValueError, match="must be a string") as caught:
        keras.Variable(1.0, name="not/allowed")
    # `caught` keeps the half-made object alive, as a notebook does with the last error.
    assert "not/allowed" in str(caught.value)
    assert strategy.variables.uninitialized() == []


@pytest.mark.compatibility
def test_mixed_precision_reads_a_mirrored_variable_in_the_compute_dtype() -> None:
    with mirrored(2).scope():
        layer = keras.layers.Dense(1, dtype="mixed_bfloat16")
        outputs = layer(np.ones((2, 3), "float32"))
    assert (outputs.dtype, layer.kernel.dtype) == ("bfloat16", "float32")
