"""Average losses of one's own training loop, and how losses depend on the rows of a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.replica_context import ReplicaBatch, ReplicaContext
from stratagem.execution.row_effects import RowEffect
from stratagem.keras.numerics.metrics import effect_of_loss, is_by_rows
from tests.marks import slow
from tests.parity.comparison import mirrored
from tests.unit.keras.replicas import per_replica

# compute_average_loss and scale_regularization_loss: the losses of one's own training loop.


def _rows(*values: float) -> np.ndarray:
    return np.asarray(values, "float32")


def _on_replicas(parts: list[Any], **arguments: Any) -> tuple[list[float], float]:
    """The average loss that each replica computes of its part, and the sum over replicas."""
    strategy = mirrored(len(parts))
    shares = strategy.run(
        lambda losses, weights: sg.compute_average_loss(
            losses, **({} if weights is None else {"sample_weight": weights}), **arguments
        ),
        args=(
            per_replica(strategy, [part[0] for part in parts]),
            None if parts[0][1] is None else per_replica(strategy, [part[1] for part in parts]),
        ),
    )
    total = strategy.reduce("sum", shares, axis=None)
    return [float(share) for share in strategy.local_results(shares)], float(total)


@pytest.mark.parametrize(
    ("losses", "weights", "size", "expected"),
    [
        (_rows(1, 2, 3), None, 8, 0.75),
        (_rows(1, 2, 3), None, None, 2.0),
        (_rows(1, 2, 3), _rows(1, 0, 1), None, np.float32(4 / 3)),
        (_rows(1, 2), None, 0, 0.0),
        (_rows(), None, None, 0.0),
        (_rows(0, 1, 2, 3, 4, 5).reshape(2, 3), _rows(2, 1)[:, None], 2, (2 * 3 + 12) / 2),
        # A batch size may be any integer scalar.
        (_rows(1, 2, 3), None, np.int64(8), 0.75),
        (_rows(1, 2, 3), None, np.asarray(8, "int32"), 0.75),
        (_rows(1, 2, 3), None, jnp.asarray(8), 0.75),
    ],
)
def test_average_loss_outside_every_scope(losses, weights, size, expected) -> None:
    assert float(sg.compute_average_loss(losses, weights, size)) == expected


@pytest.mark.parametrize(
    ("parts", "options", "shares"),
    [
        ([(_rows(1, 2, 3), _rows(1, 0, 1))] * 2, {}, [4 / 6, 4 / 6]),
        ([(_rows(1, 2), None), (_rows(6), None)], {}, [3 / 3, 6 / 3]),
        ([(_rows(1, 2), None), (_rows(6), None)], {"global_batch_size": 4}, [3 / 4, 6 / 4]),
        ([(_rows(3, 5), None), (_rows(), None)], {}, [4.0, 0.0]),
    ],
    ids=["weights", "short batch", "batch size", "no examples"],
)
def test_average_loss_divides_by_the_true_examples_of_a_short_batch(
    execution: str, parts, options, shares
) -> None:
    found, total = _on_replicas(parts, **options)
    np.testing.assert_allclose(found, shares, rtol=1e-6)
    np.testing.assert_allclose(total, sum(shares), rtol=1e-6)


def test_average_loss_keeps_a_small_dtype() -> None:
    loss = sg.compute_average_loss(jnp.ones(4, "bfloat16"), _rows(1, 1, 0, 0), global_batch_size=8)
    assert (loss.dtype, float(loss)) == ("bfloat16", 0.25)


def test_batch_size_may_be_traced() -> None:
    average = jax.jit(lambda size: sg.compute_average_loss(_rows(1, 2, 3), global_batch_size=size))
    assert float(average(8)) == 0.75
    assert float(average(0)) == 0.0


def test_cross_replica_context_needs_a_batch_size_and_scales_nothing() -> None:
    with mirrored(2).scope():
        words = "in cross-replica context without global_batch_size"
        with pytest.raises(RuntimeError, match=words):
            sg.compute_average_loss(_rows(1, 2))
        assert float(sg.compute_average_loss(_rows(1, 2), global_batch_size=2)) == 1.5
        words = "scale_regularization_loss was called in cross-replica"
        with pytest.raises(RuntimeError, match=words):
            sg.scale_regularization_loss(_rows(1, 2))


@pytest.mark.parametrize("size", [2.0, True, "2", np.asarray([2]), np.float32(2)])
def test_batch_size_that_is_no_integer_scalar_is_refused(size: Any) -> None:
    with pytest.raises(TypeError, match="an integer scalar"):
        sg.compute_average_loss(_rows(1, 2), global_batch_size=size)
    with pytest.raises(sg.errors.InvalidArgumentError, match="a number of examples, 0 or more"):
        sg.compute_average_loss(_rows(1, 2), global_batch_size=-1)
    with pytest.raises(ValueError, match="compute_average_loss received a scalar loss"):
        sg.compute_average_loss(1.0, global_batch_size=2)


def test_regularization_loss_is_divided_by_the_replicas(execution: str) -> None:
    strategy = mirrored(2)
    shares = strategy.run(lambda: sg.scale_regularization_loss(_rows(1, 2)))
    assert [float(share) for share in strategy.local_results(shares)] == [1.5, 1.5]
    assert float(sg.scale_regularization_loss([jnp.asarray(1.0), _rows(2, 3)])) == 6.0
    assert float(sg.scale_regularization_loss([])) == 0.0


# Dependence of losses on the rows of a batch, as their names and their programs show it.

SIZE = 4


def own_loss(function: Any) -> keras.losses.Loss:
    class OwnLoss(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return function(y_true, y_pred)

    return OwnLoss(reduction=None)


def effect(loss: keras.losses.Loss, shape: tuple[int, ...] = (SIZE, 3)) -> RowEffect:
    strategy: Any = sg.get_strategy()
    context = ReplicaContext(strategy, batch=ReplicaBatch(size=SIZE))
    return effect_of_loss(loss, np.ones(shape, np.float32), np.ones(shape, np.float32), context)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y, p: keras.ops.mean((y - p) ** 2, axis=-1), RowEffect.ROWS),
        (lambda y, p: keras.ops.sum((y - p) ** 2), RowEffect.SUM),
        (lambda y, p: keras.ops.mean(y * p), RowEffect.MEAN),
        (lambda y, p: keras.ops.sum(y * p, axis=0), RowEffect.MIXED),
        (lambda y, p: keras.ops.max(p, axis=0), RowEffect.MIXED),
    ],
    ids=["rows", "sum", "mean", "several sums", "largest"],
)
def test_loss_of_ones_own_is_followed(function, expected) -> None:
    assert effect(own_loss(function)) is expected


def test_losses_of_keras_by_rows_and_arrays_without_rows_are_left_to_keras() -> None:
    assert effect(keras.losses.MeanSquaredError()) is RowEffect.UNKNOWN
    assert effect(own_loss(lambda y, p: keras.ops.sum(p)), (SIZE + 1, 3)) is RowEffect.UNKNOWN
    assert effect(own_loss(lambda y, p: keras.ops.sum(p)), ()) is RowEffect.UNKNOWN


@pytest.mark.parametrize(
    "name", [slow("circle"), "dice", "tversky", "mean_absolute_error", "huber"]
)
def test_exceptions_are_the_losses_whose_rows_change_with_other_rows(name) -> None:
    """Changes one row of the predictions, and looks at the value of another."""
    function = getattr(keras.losses, name)
    rng = np.random.default_rng(0)
    labels = np.array([0, 1, 0, 1]) if name == "circle" else rng.integers(0, 2, (SIZE, 3))
    predictions = rng.random((SIZE, 3)).astype(np.float32)
    first = np.asarray(function(labels, predictions))
    predictions[1] = 1 - predictions[1]
    second = np.asarray(function(labels, predictions))
    depends = first.shape != (SIZE,) or not np.allclose(first[[0, 2, 3]], second[[0, 2, 3]])
    assert is_by_rows(function) is not depends
