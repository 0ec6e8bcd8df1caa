"""Training steps that are lowered, for devices that are here and for those that are not."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.tracing.arguments import batch_arguments
from stratagem.input.batches import take_batch
from stratagem.input.placement import place
from stratagem.keras.training.model import lower_training_step
from stratagem.strategies.compile_only import CompileOnlyStrategy
from stratagem.variables.registry import VariableKind
from tests.unit.keras.replicas import kind_of

BATCH = (
    jax.ShapeDtypeStruct((16, 6, 6, 1), "float32"),
    jax.ShapeDtypeStruct((16,), "int64"),
)


def compiled_model(strategy: sg.Strategy) -> Any:
    """A model with every kind of variable: of layers, statistics, seeds, slots and metrics."""
    keras.backend.clear_session(free_memory=False)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer="adam",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def text_of(step: Any) -> str:
    """A program without what it is called."""
    return re.sub(r"module @\S+", "", step.as_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "num_steps"),
    [
        (4, 3),
        (4, 1),
        (1, 1),
        (1, 3),
    ],
)
def test_devices_that_are_not_here_get_the_program_of_those_that_are(
    num_devices, num_steps
) -> None:
    devices = jax.devices()[:num_devices]
    here = compiled_model(sg.MirroredStrategy(devices))
    absent = compiled_model(CompileOnlyStrategy(devices))
    wanted = text_of(lower_training_step(here, BATCH, num_steps=num_steps))
    assert text_of(lower_training_step(absent, BATCH, num_steps=num_steps)) == wanted


def test_lowered_program_is_the_one_that_fit_runs() -> None:
    strategy = sg.MirroredStrategy(jax.devices()[:2])
    model = compiled_model(strategy)
    images, labels = np.ones((16, 6, 6, 1), "float32"), np.zeros(16, "int32")
    model.fit(images, labels, batch_size=16, verbose=0)
    (program,) = model.train_function._execution._programs.values()
    arguments = batch_arguments(place([take_batch((images, labels), 2)], strategy.topology))
    step = lower_training_step(model, (images, labels))
    assert len(program.trace.written) > 20  # of layers, the optimizer and metrics
    assert text_of(step) == text_of(program.lower(arguments))


def test_variables_have_shapes_and_no_values() -> None:
    model = compiled_model(CompileOnlyStrategy(jax.devices()[:4]))
    lower_training_step(model, BATCH)
    kinds = {kind_of(variable) for variable in model.metrics_variables}
    assert kinds == {VariableKind.ON_READ}
    everything = [*model.variables, *model.optimizer.variables]
    assert len(everything) > 20
    for variable in everything:
        assert isinstance(variable.storage, jax.ShapeDtypeStruct)
        stacked = (4,) if kind_of(variable) is VariableKind.ON_READ else ()
        assert variable.storage.shape == (*stacked, *variable.shape)
        assert variable.storage.dtype == variable.dtype


@pytest.mark.slow
def test_model_larger_than_any_memory_is_lowered() -> None:
    with CompileOnlyStrategy(jax.devices()[:2]).scope():
        layers = [keras.Input((2**20,)), *(keras.layers.Dense(2**20) for _ in range(3))]
        model = keras.Sequential(layers)
        model.compile(optimizer="adam", loss="mse")
    row = jax.ShapeDtypeStruct((2, 2**20), "float32")
    step = lower_training_step(model, (row, row))
    arguments = jax.tree.leaves(step.args_info)
    num_bytes = sum(4 * math.prod(one.shape) for one in arguments)
    assert num_bytes > 3 * 3 * 4 * 2**40  # parameters and two slots: 36 TiB


def test_value_read_outside_of_a_step_is_what_it_would_begin_with() -> None:
    with CompileOnlyStrategy(jax.devices()[:2]).scope():
        variable = keras.Variable(np.arange(3.0, dtype="float32"))
        optimizer = keras.optimizers.SGD(0.25)
        variable.assign(np.zeros(3))  # dropped
    np.testing.assert_array_equal(np.asarray(variable.value), [0, 1, 2])
    assert float(optimizer.learning_rate) == 0.25


def test_model_of_no_strategy_is_moved_by_compile() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    kernel = np.asarray(model.layers[0].kernel.value)
    sg.compile(model, distribute=CompileOnlyStrategy(jax.devices()[:2]), loss="mse")
    shape = jax.ShapeDtypeStruct((4, 3), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
    assert "all_reduce" in lower_training_step(model, shape).as_text()
    assert isinstance(model.layers[0].kernel.storage, jax.ShapeDtypeStruct)
    np.testing.assert_array_equal(np.asarray(model.layers[0].kernel.value), kernel)


def test_model_of_no_strategy_is_refused() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(loss="mse")
    with pytest.raises(ValueError, match="belongs to no strategy"):
        lower_training_step(model, BATCH)


@pytest.mark.parametrize("sizes", [(15, 15), (16, 8), (0, 0)])
def test_batch_that_replicas_cannot_share_evenly_is_refused(sizes) -> None:
    model = compiled_model(CompileOnlyStrategy(jax.devices()[:4]))
    images = jax.ShapeDtypeStruct((sizes[0], 6, 6, 1), "float32")
    labels = jax.ShapeDtypeStruct((sizes[1],), "int32")
    with pytest.raises(ValueError, match="over 4 replicas"):
        lower_training_step(model, (images, labels))
