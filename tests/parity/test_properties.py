"""Any number of examples, batch size and replicas give the numbers of a model in NumPy."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.parity.comparison import example_weights, fitted, mirrored, plain_keras, regression
from tests.parity.linear_model import Adam, LinearModel, Momentum

_OPTIMIZERS = {
    "adam": (lambda: keras.optimizers.Adam(0.05), Adam),
    "momentum": (lambda: keras.optimizers.SGD(0.05, momentum=0.9), Momentum),
}


def _model(optimizer: str) -> Any:
    layer = keras.layers.Dense(
        1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.1)
    )
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile(optimizer=_OPTIMIZERS[optimizer][0](), loss="mse", metrics=["mae"])
    return model


def _measured(model: Any, weights: np.ndarray | None, num_examples: int, batch_size: int) -> Any:
    x, y = regression(num_examples)
    arguments = {"batch_size": batch_size, "sample_weight": weights}
    history = model.fit(x, y, epochs=2, shuffle=False, verbose=0, **arguments).history
    logs = model.evaluate(x, y, verbose=0, return_dict=True, **arguments)
    return {
        "fit": [history["loss"], history["mae"]],
        "evaluate": [logs["loss"], logs["mae"]],
        "predict": model.predict(x, batch_size=batch_size, verbose=0),
        "kernel": np.asarray(model.layers[0].kernel.value),
        "bias": np.asarray(model.layers[0].bias.value),
    }


def _expected(
    optimizer: str, weights: np.ndarray | None, num_examples: int, batch_size: int
) -> Any:
    x, y = (array.astype("float64") for array in regression(num_examples))
    weights = np.ones(num_examples) if weights is None else weights.astype("float64")
    model = LinearModel(np.ones((3, 1)), np.zeros(1), _OPTIMIZERS[optimizer][1])
    epochs = [model.measure(x, y, weights, batch_size, is_training=True) for _ in range(2)]
    logs = model.measure(x, y, weights, batch_size, is_training=False)
    return {
        "fit": [[epoch["loss"] for epoch in epochs], [epoch["mae"] for epoch in epochs]],
        "evaluate": [logs["loss"], logs["mae"]],
        "predict": model.predict(x),
        "kernel": model.kernel,
        "bias": model.bias,
    }


def _assert_equal(measured: Any, expected: Any) -> None:
    for name, value in expected.items():
        # 80 steps of Adam in float32 against float64.
        np.testing.assert_allclose(measured[name], value, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_plain_keras_computes_what_numpy_does(optimizer: str) -> None:
    weights = example_weights(11)
    measured = plain_keras(lambda _: _measured(_model(optimizer), weights, 11, 4))
    _assert_equal(measured, _expected(optimizer, weights, 11, 4))


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    num_examples=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    num_replicas=st.integers(1, 8),
    optimizer=st.sampled_from(sorted(_OPTIMIZERS)),
    is_weighted=st.booleans(),
)
# More replicas than examples; a last batch of one; a batch that leaves replicas empty.
@example(num_examples=1, batch_size=17, num_replicas=8, optimizer="adam", is_weighted=False)
@example(num_examples=33, batch_size=16, num_replicas=2, optimizer="momentum", is_weighted=True)
@example(num_examples=12, batch_size=4, num_replicas=3, optimizer="adam", is_weighted=True)
@pytest.mark.slow
def test_any_split_gives_the_numbers_of_one_device(
    num_examples: int, batch_size: int, num_replicas: int, optimizer: str, is_weighted: bool
) -> None:
    weights = example_weights(max(2, num_examples))[:num_examples] if is_weighted else None
    keras.backend.clear_session(free_memory=False)
    with mirrored(num_replicas).scope():
        model = _model(optimizer)
    measured = _measured(model, weights, num_examples, batch_size)
    _assert_equal(measured, _expected(optimizer, weights, num_examples, batch_size))


class _Counting(keras.layers.Layer):
    """Counts how often Python runs its `call`, which it does only while a step is traced."""

    num_calls = 0

    def call(self, inputs: Any) -> Any:
        self.num_calls += 1
        return inputs


def _traces(num_examples: int, epochs: int, **compile_arguments: Any) -> int:
    """Trains on two replicas in batches of 4 and returns how often the model was run in Python."""
    x, y = regression(num_examples)
    keras.backend.clear_session(free_memory=False)
    with mirrored(2).scope():
        counting = _Counting()
        model = keras.Sequential([keras.Input((3,)), counting, keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse", **compile_arguments)
    before = counting.num_calls
    fitted(model, x, y, batch_size=4, epochs=epochs)
    return counting.num_calls - before


def test_a_step_is_traced_once_however_often_it_runs() -> None:
    once = _traces(num_examples=4, epochs=1)
    assert once > 0
    assert _traces(num_examples=16, epochs=3) == once


@pytest.mark.slow
def test_a_short_batch_is_traced_in_the_first_epoch_only() -> None:
    once = _traces(num_examples=11, epochs=1)
    assert 0 < once <= 2 * _traces(num_examples=4, epochs=1)
    assert _traces(num_examples=11, epochs=3) == once


def test_several_steps_a_call_are_traced_once() -> None:
    once = _traces(num_examples=16, epochs=1, steps_per_execution=4)
    assert once > 0
    assert _traces(num_examples=16, epochs=3, steps_per_execution=4) == once


def test_evaluate_and_predict_trace_nothing_the_second_time() -> None:
    x, y = regression(11)
    with mirrored(3).scope():
        counting = _Counting()
        model = keras.Sequential([keras.Input((3,)), counting, keras.layers.Dense(1)])
        model.compile(loss="mse")
    before = counting.num_calls
    model.evaluate(x, y, batch_size=4, verbose=0)
    model.predict(x, batch_size=4, verbose=0)
    first = counting.num_calls - before
    model.evaluate(x, y, batch_size=4, verbose=0)
    model.predict(x, batch_size=4, verbose=0)
    assert 0 < first == counting.num_calls - before
