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
