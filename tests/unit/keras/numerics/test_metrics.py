"""Metrics in replicas: a part a replica, a result of all, and no padding in it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.parity.comparison import mirrored
from tests.unit.keras.replicas import components_of, per_replica

_VALUES = np.asarray([1.0, 2.0, 4.0, 8.0, 16.0], "float32")
# How five values lie on replicas: a short last part, a replica with none.
_SIZES = [(3, 2), (3, 2, 0)]


def _split(array: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(sizes)[:-1])


def _updated(metric_class: Any, sizes: tuple[int, ...], *arrays: np.ndarray) -> Any:
    """A metric made under a strategy and updated once with rows of these arrays."""
    strategy = mirrored(len(sizes))
    with strategy.scope():
        metric = metric_class()
    parts = [per_replica(strategy, _split(array, sizes)) for array in arrays]
    strategy.run(metric.update_state, args=parts)
    return metric


class _Largest(keras.metrics.Metric):
    """A sum and an integer count of true rows; takes no weights and knows nothing of replicas."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.rows = self.add_variable((), "zeros", dtype="int32", name="rows")

    def update_state(self, values: Any) -> None:
        values = keras.ops.convert_to_tensor(values)
        self.total.assign_add(keras.ops.sum(keras.ops.square(values)))
        self.rows.assign_add(keras.ops.full((), values.shape[0], dtype="int32"))

    def result(self) -> Any:
        return {"total": self.total.value, "rows": self.rows.value}


class _Both(keras.metrics.Metric):
    """Has no state of its own: two other metrics hold it."""

    def __init__(self) -> None:
        super().__init__(name="both")
        self.mean = keras.metrics.Mean()
        self.sum = keras.metrics.Sum()

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        self.mean.update_state(values, sample_weight)
        self.sum.update_state(values * 2.0, sample_weight)

    def result(self) -> Any:
        return keras.ops.stack([self.mean.result(), self.sum.result()])


class _CountsUpdatesToo(_Both):
    """Has state of its own beside the inner metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = self.add_variable((), "zeros", dtype="int32", name="updates")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        super().update_state(values, sample_weight)
        self.updates.assign_add(keras.ops.ones((), "int32"))


@pytest.mark.compatibility
def test_each_replica_updates_its_part_and_the_result_is_of_all(execution: str) -> None:
    metric = _updated(keras.metrics.Mean, (2, 2), _VALUES[:4])
    assert components_of(metric.total) == [3.0, 12.0]
    assert components_of(metric.count) == [2.0, 2.0]
    assert float(metric.result()) == 15 / 4


@pytest.mark.compatibility
@pytest.mark.parametrize("sizes", _SIZES)
def test_padding_does_not_count(sizes: tuple[int, ...], execution: str) -> None:
    metric = _updated(keras.metrics.Mean, sizes, _VALUES)
    assert float(metric.count.value) == 5.0
    np.testing.assert_allclose(float(metric.result()), _VALUES.mean(), rtol=1e-6)


@pytest.mark.parametrize("sizes", _SIZES)
def test_padding_does_not_count_beside_weights(sizes: tuple[int, ...]) -> None:
    rows = np.stack([_VALUES, _VALUES + 1.0], axis=1)
    weights = np.asarray([1.0, 0.0, 2.0, 0.5, 3.0], "float32")
    metric = _updated(keras.metrics.MeanAbsoluteError, sizes, rows * 0.5, rows, weights)
    errors = np.abs(rows * 0.5).mean(axis=1)
    np.testing.assert_allclose(
        float(metric.result()), np.average(errors, weights=weights), rtol=1e-6
    )


@pytest.mark.parametrize("sizes", _SIZES)
def test_padding_does_not_count_in_a_metric_without_weights(
    sizes: tuple[int, ...], execution: str
) -> None:
    metric = _updated(_Largest, sizes, _VALUES)
    result = metric.result()
    assert (float(result["total"]), int(result["rows"])) == (float(np.sum(_VALUES**2)), 5)
    assert components_of(metric.rows) == list(sizes)


@pytest.mark.compatibility
@pytest.mark.parametrize("metric_class", [_Both, _CountsUpdatesToo])
def test_metric_made_of_metrics(metric_class: Any) -> None:
    metric = _updated(metric_class, (3, 2, 0), _VALUES)
    np.testing.assert_allclose(
        np.asarray(metric.result()), [_VALUES.mean(), 2 * _VALUES.sum()], rtol=1e-6
    )


@pytest.mark.parametrize(
    "metric_class",
    [
        pytest.param(keras.metrics.Mean, marks=pytest.mark.compatibility),
        _Largest,
        _CountsUpdatesToo,
    ],
)
def test_reset_empties_every_component(metric_class: Any) -> None:
    metric = _updated(metric_class, (3, 2), _VALUES)
    assert all(any(components_of(variable)) for variable in metric.variables)
    metric.reset_state()
    assert not any(any(components_of(variable)) for variable in metric.variables)


def test_update_outside_the_replicas_counts_once() -> None:
    strategy = mirrored(3)
    with strategy.scope():
        metrics = [keras.metrics.Mean(), _Largest()]
        for metric in metrics:
            metric.update_state(_VALUES)
            metric.update_state(_VALUES[:1])
    assert float(metrics[0].count.value) == 6.0
    np.testing.assert_allclose(float(metrics[0].result()), (31 + 1) / 6, rtol=1e-6)
    assert int(metrics[1].result()["rows"]) == 6


def test_updates_inside_and_outside_the_replicas_add_up() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        metric = keras.metrics.Mean()
    parts = per_replica(strategy, [_VALUES[:2], _VALUES[2:4]])
    strategy.run(metric.update_state, args=(parts,))
    with strategy.scope():
        metric.update_state(_VALUES[4])
    strategy.run(metric.update_state, args=(parts,))
    np.testing.assert_allclose(float(metric.result()), (2 * 15 + 16) / 9, rtol=1e-6)


def test_update_outside_the_scope_counts_once_too() -> None:
    with mirrored(2).scope():
        metric = keras.metrics.Mean()
    metric.update_state(_VALUES)
    assert float(metric.result()) == np.float32(_VALUES.mean())


def test_metric_of_scalars_counts_one_value_a_replica() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        metric = keras.metrics.Mean()
    strategy.run(metric.update_state, args=(per_replica(strategy, [np.float32(1), np.float32(4)]),))
    assert components_of(metric.count) == [1.0, 1.0]
    assert float(metric.result()) == 2.5


def test_result_may_be_asked_in_between() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        metric = keras.metrics.Sum()
    results = []
    for values in (_VALUES[:2], _VALUES[2:4]):
        parts = per_replica(strategy, [values[:1], values[1:]])
        strategy.run(metric.update_state, args=(parts,))
        results.append(float(metric.result()))
    assert results == [3.0, 15.0]


@pytest.mark.compatibility
def test_metric_with_state_that_is_not_a_sum() -> None:
    class Highest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="highest")
            self.step = self.add_variable((), "zeros", aggregation="only_first_replica")

        def update_state(self, values: Any) -> None:
            self.step.assign_add(keras.ops.cast(keras.ops.size(values), "float32"))

        def result(self) -> Any:
            return self.step.value

    metric = _updated(Highest, (3, 2), _VALUES)
    assert components_of(metric.step) == [3.0, 2.0]
    assert float(metric.result()) == 3.0


@pytest.mark.compatibility
def test_metric_called_as_a_function_updates_and_reports() -> None:
    with mirrored(2).scope():
        metric = keras.metrics.Mean()
        assert float(metric(_VALUES[:2])) == 1.5
        assert float(metric(_VALUES[2:3])) == np.float32(7 / 3)


@pytest.mark.compatibility
def test_metric_of_no_strategy_is_as_ever() -> None:
    metric = keras.metrics.Mean()
    metric.update_state(_VALUES, sample_weight=np.asarray([1, 0, 0, 0, 1], "float32"))
    assert float(metric.result()) == 8.5


class _Targets(keras.metrics.Metric):
    """Sums its first argument, and takes one by name only."""

    def __init__(self) -> None:
        super().__init__(name="targets")
        self.total = self.add_variable((), "zeros")

    def update_state(self, y_true: Any, y_pred: Any, *, scale: float = 1.0) -> None:
        self.total.assign_add(scale * keras.ops.sum(y_true))

    def result(self) -> Any:
        return self.total.value


@pytest.mark.parametrize("num_rows", [3, 4])
def test_arguments_stay_in_their_order_in_a_short_batch(num_rows: int, execution: str) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        metric = _Targets()
    ones = np.ones(num_rows, "float32")
    (batch,) = strategy.distribute_dataset([(ones, 100 * ones)])
    strategy.run(metric.update_state, args=batch, kwargs={"scale": 2.0})
    assert float(metric.result()) == 2.0 * num_rows


class _FromThree(keras.metrics.Metric):
    """A sum that begins at three, and an integer that begins at one."""

    def __init__(self) -> None:
        super().__init__(name="from_three")
        self.total = self.add_variable((), keras.initializers.Constant(3.0))
        self.updates = self.add_variable((), "ones", dtype="int32")

    def update_state(self, values: Any) -> None:
        self.total.assign_add(keras.ops.sum(values))

    def result(self) -> Any:
        return self.total.value


def test_initial_value_of_a_metric_counts_once() -> None:
    strategy = mirrored(3)
    with strategy.scope():
        metric = _FromThree()
    assert (float(metric.result()), int(metric.updates.value)) == (3.0, 1)
    parts = per_replica(strategy, _split(_VALUES, (3, 2, 0)))
    strategy.run(metric.update_state, args=(parts,))
    assert float(metric.result()) == 3.0 + float(_VALUES.sum())


@pytest.mark.compatibility
@pytest.mark.parametrize("in_replicas", [True, False])
def test_metric_that_makes_variables_at_its_first_update(in_replicas: bool) -> None:
    y_true = np.asarray([[1.0], [2.0], [5.0]], "float32")
    y_pred = np.asarray([[1.0], [2.5], [4.0]], "float32")
    strategy = mirrored(2)
    with strategy.scope():
        metric = keras.metrics.R2Score()
        if not in_replicas:
            metric.update_state(y_true, y_pred)
    if in_replicas:
        (batch,) = strategy.distribute_dataset([(y_true, y_pred)])
        strategy.run(metric.update_state, args=batch)
    residual, total = 0.25 + 1.0, float(np.sum((y_true - y_true.mean()) ** 2))
    np.testing.assert_allclose(float(metric.result()), 1.0 - residual / total, rtol=1e-6)


@pytest.mark.compatibility
def test_metric_made_before_the_scope_moves_to_the_strategy_of_its_model() -> None:
    y_true = np.asarray([[1.0], [2.0], [5.0]], "float32")
    metric = keras.metrics.MeanAbsoluteError()
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Activation("linear")])
        model.compile("sgd", "mse", metrics=[metric])
    logs = model.evaluate(y_true + 0.5, y_true, batch_size=3, verbose=0, return_dict=True)
    np.testing.assert_allclose(logs["mean_absolute_error"], 0.5, rtol=1e-6)
    assert len(components_of(metric.total)) == 2


def test_metric_made_before_the_scope_says_so_in_a_loop() -> None:
    strategy, metric = mirrored(2), keras.metrics.Mean(name="early")
    parts = per_replica(strategy, [_VALUES[:2], _VALUES[2:4]])
    with pytest.raises(ValueError, match=r"'early' was created outside .*\n.*\nFix: create Mean\("):
        strategy.run(metric.update_state, args=(parts,))
