"""What a step of one's own computes that is not that of one device is said, with its line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import stratagem as sg
from tests.parity.comparison import mirrored

_FILE = Path(__file__).name


def _warned(loss: Callable[[Any, Any], Any], num_rows: int, num_replicas: int) -> list[str]:
    """The warnings of two epochs with a loss in a `train_step` of one's own."""
    x = np.linspace(0.0, 1.0, 3 * num_rows, dtype="float32").reshape(num_rows, 3)

    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            value, gradients = sg.value_and_grad(
                lambda: loss(y, self(x, training=True)), self.trainable_variables
            )
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": value}

    with mirrored(num_replicas).scope():
        inputs = keras.Input((3,))
        model = Own(inputs, keras.layers.Dense(2, kernel_regularizer="l2")(inputs))
        model.compile(keras.optimizers.SGD(0.05))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(x, x[:, :2], batch_size=num_rows, epochs=2, verbose=0)
    return [str(one.message) for one in caught if "SG409" in str(one.message)]


def _mean(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p))  # this line


def _ratio(y: Any, p: Any) -> Any:
    kept = ops.cast(y > 0.5, "float32")
    return ops.sum(kept * ops.square(y - p)) / ops.sum(kept)  # this line


def _root(y: Any, p: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y - p)))  # this line


def _pairs(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(ops.matmul(p, ops.transpose(y))))  # this line


def _masked_by_hand(y: Any, p: Any) -> Any:
    context = sg.get_replica_context()
    mask = ops.cast(context.example_mask, "float32")
    return ops.sum(mask * ops.mean(ops.square(y - p), -1)) / ops.maximum(ops.sum(mask), 1.0)


def _of_all(y: Any, p: Any) -> Any:
    context = sg.get_replica_context()
    kept = ops.cast(y > 0.5, "float32")
    return ops.sum(kept * ops.square(y - p)) / context.all_reduce("sum", ops.sum(kept))


def _summed_mean(y: Any, p: Any) -> Any:
    own = sg.compute_average_loss(ops.mean(ops.square(y - p), -1))
    return sg.get_replica_context().all_reduce("sum", own)  # this line


def _line(function: Callable[..., Any]) -> str:
    lines = Path(__file__).read_text().splitlines()
    start = function.__code__.co_firstlineno
    found = next(n for n, line in enumerate(lines[start:], start + 1) if "# this line" in line)
    return f"{_FILE}:{found}"


@pytest.mark.parametrize(
    ("loss", "num_rows"),
    [(_ratio, 4), pytest.param(_root, 4, marks=pytest.mark.slow), (_pairs, 4)],
)
def test_number_that_is_no_mean_over_rows_is_named_once(
    loss: Callable[..., Any], num_rows: int
) -> None:
    (text,) = _warned(loss, num_rows, 2)
    assert text.startswith("Own.train_step computes a number from the rows of one replica at ")
    assert _line(loss) in text.partition("\n")[0]


def test_mean_over_rows_is_named_where_padding_counts() -> None:
    (text,) = _warned(_mean, 5, 3)
    assert f"combines the rows of a replica at {_line(_mean)}, and a batch has parts of" in text
    assert "(2, 2, 1) rows" in text


@pytest.mark.parametrize(
    ("loss", "num_rows", "num_replicas"),
    [
        pytest.param(_mean, 6, 3, marks=pytest.mark.slow),
        (_masked_by_hand, 5, 3),
        pytest.param(_of_all, 4, 2, marks=pytest.mark.slow),
        pytest.param(_ratio, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_numbers_of_one_device_are_not_warned_of(
    loss: Callable[..., Any], num_rows: int, num_replicas: int
) -> None:
    assert _warned(loss, num_rows, num_replicas) == []


def test_sum_over_rows_with_a_penalty_is_named() -> None:
    (text,) = _warned(lambda y, p: ops.sum(ops.square(y - p)) / 8 + 0.5, 4, 2)
    assert text.startswith("A loss in Own.train_step adds a sum over rows to a number that does")


def test_sum_of_means_over_replicas_is_named() -> None:
    (text,) = _warned(_summed_mean, 4, 2)
    assert f"adds up a mean over rows over the replicas at {_line(_summed_mean)}" in text
    assert "2 means add up to 2 times the mean" in text


class _Weighed(keras.Model):
    """A sum over rows with weights, and a mean without."""

    def train_step(self, data: Any) -> Any:
        x, y, *weights = data

        def loss() -> Any:
            values = ops.mean(ops.square(self(x, training=True) - y), -1)
            return ops.sum(values * weights[0]) if weights else ops.mean(values)

        value, gradients = sg.value_and_grad(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": value}


class _Masked(keras.Model):
    """A mean by hand that leaves out the padding of unequal parts."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        context = sg.get_replica_context()
        kept = ops.cast(context.example_mask, "float32")

        def loss() -> Any:
            values = ops.mean(ops.square(self(x, training=True) - y), -1)
            return ops.sum(kept * values) / context.global_num_examples

        value, gradients = sg.value_and_grad(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": value}


def _fitted(kind: type[keras.Model], num_replicas: int, num_rows: int, *, weighs: bool) -> Any:
    x = np.linspace(0.0, 1.0, 3 * num_rows, dtype="float32").reshape(num_rows, 3)
    options: Any = {"batch_size": num_rows, "verbose": 0}
    with mirrored(num_replicas).scope():
        inputs = keras.Input((3,))
        model = kind(inputs, keras.layers.Dense(2, kernel_initializer="ones")(inputs))
        model.compile(keras.optimizers.SGD(0.05))
    losses = model.fit(x, x[:, :2], **options).history["own"]
    if weighs:
        losses += model.fit(x, x[:, :2], sample_weight=x[:, 0], **options).history["own"]
    return [*losses, *np.ravel(model.get_weights()[0])]


def test_step_may_sum_with_weights_and_average_without() -> None:
    expected = _fitted(_Weighed, 1, 4, weighs=True)
    np.testing.assert_allclose(_fitted(_Weighed, 2, 4, weighs=True), expected, rtol=1e-5)


def test_masked_sum_by_hand_is_exact_for_unequal_parts() -> None:
    x = np.linspace(0.0, 1.0, 15, dtype="float64").reshape(5, 3)
    errors = x.sum(1, keepdims=True) - x[:, :2]
    kernel = 1 - 0.05 * x.T @ errors / 5  # the gradient of the mean over 5 rows of 2 columns
    loss, *weights = _fitted(_Masked, 3, 5, weighs=False)
    np.testing.assert_allclose(loss, np.mean(errors**2), rtol=1e-5)
    np.testing.assert_allclose(weights, kernel.ravel(), rtol=1e-5)
