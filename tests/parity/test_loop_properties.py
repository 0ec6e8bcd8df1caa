"""Loops of one's own: any number of examples, batch size and replicas give NumPy's numbers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import stratagem as sg
from tests.parity.comparison import example_weights, mirrored, regression
from tests.parity.linear_model import Adam, LinearModel, Momentum

_OPTIMIZERS = {
    "adam": (lambda: keras.optimizers.Adam(0.05), Adam),
    "momentum": (lambda: keras.optimizers.SGD(0.05, momentum=0.9), Momentum),
}


class _Loop:
    """Weighted least squares with a penalty, measured in every way that a loop can measure."""

    def __init__(self, strategy: sg.Strategy, optimizer: str) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.layer = keras.layers.Dense(1, kernel_initializer="ones")
            self.layer.build((None, 3))
            self.optimizer = _OPTIMIZERS[optimizer][0]()
            self.absolute = keras.metrics.MeanAbsoluteError()
            self.rows = keras.metrics.Sum()

    def step(self, batch: Any) -> Any:
        x, y, weights = batch
        variables = self.layer.trainable_variables

        def loss_fn() -> Any:
            predicted = self.layer(x)
            squares = keras.ops.square(predicted - y)[:, 0]
            loss = sg.compute_average_loss(squares, sample_weight=weights)
            penalty = 0.1 * keras.ops.sum(keras.ops.square(self.layer.kernel))
            return loss + sg.scale_regularization_loss(penalty), predicted

        (loss, predicted), grads = sg.value_and_grad(loss_fn, variables, has_aux=True)
        self.optimizer.apply_gradients(zip(grads, variables, strict=True))
        self.absolute.update_state(y, predicted)
        self.rows.update_state(keras.ops.ones_like(weights))
        context = sg.get_replica_context()
        return (*context.all_reduce("SUM", (loss, grads)), predicted)

    def step_without_rows(self, batch: Any) -> Any:
        """Rows of short and of whole batches cannot be stacked."""
        return self.step(batch)[:2]

    def steps_of(self, dataset: Any, way: str) -> list[tuple[Any, Any, Any]]:
        """Each step's loss, gradients of all replicas, and predictions of all, None if unknown."""
        if way == "run_steps":
            return self._steps_at_once(dataset)
        called = sg.function(self._global_step) if way == "function" else self._global_step
        results: list[tuple[Any, Any, Any]] = []
        for batch in dataset:
            loss, grads, predicted = called(batch)
            results.append((loss, grads, self.strategy.gather(predicted, axis=0)))
        return results

    def _global_step(self, batch: Any) -> Any:
        loss, grads, predicted = self.strategy.run(self.step, args=(batch,))
        return *self.strategy.reduce("MEAN", (loss, grads), axis=None), predicted

    def _steps_at_once(self, dataset: Any) -> list[tuple[Any, Any, Any]]:
        iterator = iter(dataset)
        results: list[tuple[Any, Any, Any]] = []
        while True:
            try:
                step = self.step_without_rows
                losses, grads = self.strategy.run_steps(step, iterator, 3, reduce="mean")
            except StopIteration:
                return results
            results += [
                (loss, [grad[index] for grad in grads], None) for index, loss in enumerate(losses)
            ]


@pytest.mark.slow
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
    way=st.sampled_from(["run", "function", "run_steps"]),
)
# More replicas than examples; a last batch of one; a batch that leaves replicas empty.
@example(num_examples=1, batch_size=17, num_replicas=8, optimizer="adam", way="run")
@example(num_examples=33, batch_size=16, num_replicas=2, optimizer="momentum", way="run_steps")
@example(num_examples=12, batch_size=4, num_replicas=3, optimizer="adam", way="function")
def test_loss_gradients_and_metrics_are_those_of_one_device(
    num_examples: int, batch_size: int, num_replicas: int, optimizer: str, way: str
) -> None:
    x, y = regression(num_examples)
    weights = example_weights(max(2, num_examples))[:num_examples]
    strategy = mirrored(num_replicas)
    loop = _Loop(strategy, optimizer)
    data = sg.input.Dataset((x, y, weights), batch_size=batch_size)
    steps = loop.steps_of(strategy.distribute_dataset(data), way)

    expected = LinearModel(np.ones((3, 1)), np.zeros(1), _OPTIMIZERS[optimizer][1])
    absolute = 0.0
    starts = range(0, num_examples, batch_size)
    for start, (loss, grads, predicted) in zip(starts, steps, strict=True):
        rows = slice(start, start + batch_size)
        here = (x[rows], y[rows], weights[rows])
        if predicted is not None:
            _assert_close(predicted, expected.predict(x[rows]))
        for grad, wanted in zip(grads, _gradients(expected, *here), strict=True):
            _assert_close(grad, wanted)
        measured = expected.measure(*here, batch_size, is_training=True)
        _assert_close(loss, measured["loss"])
        absolute += measured["mae"] * len(here[0])
    _assert_close(loop.layer.kernel.value, expected.kernel)
    _assert_close(loop.layer.bias.value, expected.bias)
    _assert_close(loop.absolute.result(), absolute / num_examples)
    assert float(loop.rows.result()) == num_examples


def _gradients(model: LinearModel, x: Any, y: Any, weights: Any) -> tuple[Any, Any]:
    slope = 2 * weights[:, None] / len(x) * (model.predict(x) - y)
    return x.T @ slope + 0.2 * model.kernel, np.sum(slope, axis=0)


def _assert_close(measured: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(measured), expected, rtol=1e-4, atol=2e-5)


def test_one_loop_is_that_of_one_device() -> None:
    """The property above by one example, for runs that leave out what takes long."""
    check = test_loss_gradients_and_metrics_are_those_of_one_device.hypothesis.inner_test
    check(num_examples=5, batch_size=4, num_replicas=2, optimizer="momentum", way="function")
