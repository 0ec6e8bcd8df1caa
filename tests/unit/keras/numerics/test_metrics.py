"""Metrics in replicas: a part a replica, a result of all, and no padding in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import Scope, assert_like_plain_keras, fitted, mirrored, regression
from tests.unit.keras.numerics.decoder_blocks import Block, decoder, equations
from tests.unit.keras.replicas import components_of, copies_of, per_replica, values_of

_VALUES = np.asarray([1.0, 2.0, 4.0, 8.0, 16.0], "float32")
# How five values lie on replicas: a short last part, a replica with none.
_SIZES = [(3, 2), (3, 2, 0)]


def _split(array: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(sizes)[:-1])


def _made(metric_class: Any, num_replicas: int = 2) -> tuple[Any, Any]:
    """A strategy and a metric made in its scope."""
    strategy = mirrored(num_replicas)
    with strategy.scope():
        return strategy, metric_class()


def _updated(metric_class: Any, sizes: tuple[int, ...], *arrays: np.ndarray) -> Any:
    """A metric made under a strategy and updated once with rows of these arrays."""
    strategy, metric = _made(metric_class, len(sizes))
    parts = [per_replica(strategy, _split(array, sizes)) for array in arrays]
    strategy.run(metric.update_state, args=parts)
    return metric


class _Squares(keras.metrics.Metric):
    """A sum and an integer count of true rows; takes no weights and knows nothing of replicas."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(name="squares")
        initializer = keras.initializers.Constant(start)
        self.total = self.add_variable((), initializer, name="total")
        self.rows = self.add_variable((), initializer, dtype="int32", name="rows")

    def update_state(self, values: Any, others: Any = None, *, scale: float = 1.0) -> None:
        values = keras.ops.convert_to_tensor(values)
        self.total.assign_add(scale * keras.ops.sum(keras.ops.square(values)))
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
@pytest.mark.parametrize("sizes", _SIZES)
def test_padding_does_not_count(sizes: tuple[int, ...], execution: str) -> None:
    metric = _updated(keras.metrics.Mean, sizes, _VALUES)
    assert components_of(metric.count) == list(sizes)
    assert components_of(metric.total) == [part.sum() for part in _split(_VALUES, sizes)]
    assert float(metric.count.value) == 5.0
    np.testing.assert_allclose(float(metric.result()), _VALUES.mean(), rtol=1e-6)
    metric = _updated(_Squares, sizes, _VALUES)  # takes no weights
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
        _Squares,
        _CountsUpdatesToo,
    ],
)
def test_reset_empties_every_component(metric_class: Any) -> None:
    metric = _updated(metric_class, (3, 2), _VALUES)
    assert all(any(components_of(variable)) for variable in metric.variables)
    metric.reset_state()
    assert not any(any(components_of(variable)) for variable in metric.variables)


def test_updates_inside_and_outside_the_replicas_add_up() -> None:
    """Outside an update counts once, whether in the scope or not; scalars count, too."""
    strategy, metric = _made(keras.metrics.Mean)
    parts = per_replica(strategy, [_VALUES[:2], _VALUES[2:4]])
    strategy.run(metric.update_state, args=(parts,))
    with strategy.scope():
        metric.update_state(_VALUES[4])
    metric.update_state(_VALUES[:2])
    scalars = per_replica(strategy, [np.float32(1), np.float32(4)])
    strategy.run(metric.update_state, args=(scalars,))
    np.testing.assert_allclose(float(metric.result()), (15 + 16 + 3 + 5) / 9, rtol=1e-6)


@pytest.mark.parametrize("num_rows", [3, 4])
def test_arguments_stay_in_their_order_in_a_short_batch(num_rows: int, execution: str) -> None:
    strategy, metric = _made(_Squares)
    ones = np.ones(num_rows, "float32")
    (batch,) = strategy.distribute_dataset([(ones, 100 * ones)])
    strategy.run(metric.update_state, args=batch, kwargs={"scale": 2.0})
    assert float(metric.result()["total"]) == 2.0 * num_rows


def test_initial_value_of_a_metric_counts_once() -> None:
    strategy, metric = _made(lambda: _Squares(3), 3)
    assert (float(metric.result()["total"]), int(metric.result()["rows"])) == (3.0, 3)
    parts = per_replica(strategy, _split(_VALUES, (3, 2, 0)))
    strategy.run(metric.update_state, args=(parts,))
    assert float(metric.result()["total"]) == 3.0 + float(np.sum(_VALUES**2))


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


# `sg.scan_layers`: equal layers in one loop, with the results of single layers.


def _num_scans(model: Any, call: Callable[[Any], Any] | None = None) -> int:
    jaxpr = jax.make_jaxpr(call or (lambda x: model(x)))(np.ones((2, 4), "float32"))
    return len(equations(jaxpr.jaxpr, "scan"))


def _blocks(model: Any) -> list[Any]:
    return [one for one in model.layers if isinstance(one, Block)]


def test_only_calls_of_the_model_are_scanned() -> None:
    model: Any = decoder()
    first, second = sg.scan_layers(model)
    assert [first, second] == _blocks(model)
    assert _num_scans(model) == 1
    assert _num_scans(model, lambda x: second(first(x))) == 0
    x = np.ones((2, 4), "float32")
    np.testing.assert_allclose(model(x), model.predict(x, verbose=0), rtol=1e-6)


@pytest.mark.slow
def test_layers_in_sequential_models_and_with_two_equal_arguments() -> None:
    tower = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(3))])
    assert len(sg.scan_layers(tower, layers="dense")) == 3
    assert _num_scans(tower) == 1
    x = inputs = keras.Input((3, 4))
    for _ in range(2):
        x = keras.layers.MultiHeadAttention(1, 4)(x, x)
    model: Any = keras.Model(inputs, x)
    data = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    expected = model(data)
    sg.scan_layers(model)
    np.testing.assert_allclose(model.predict(data, verbose=0), expected, rtol=1e-5)


def _row(*layers: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), *layers])


@pytest.mark.parametrize("change", ["frozen", "rate"])
def test_layers_that_differ_after_they_were_chosen_are_refused(change) -> None:
    model: Any = decoder()
    sg.scan_layers(model)
    first, second = _blocks(model)
    if change == "frozen":
        first.trainable = False
        words = "differs from the first one in trainable: False and True"
    else:
        second.dropout.rate = 0.25
        words = "rate: 0.5 and 0.25"
    with pytest.raises(ValueError, match=words):
        _num_scans(model)
    second.trainable, first.dropout.rate = first.trainable, second.dropout.rate
    assert _num_scans(model) == 1


class _NotingShape(keras.layers.Dense):
    def call(self, inputs: Any) -> Any:
        self.last_rows = inputs.shape[0]
        return super().call(inputs)


def test_layers_that_set_attributes_in_their_calls_are_scanned_again() -> None:
    model = _row(_NotingShape(4, name="dense"), _NotingShape(4, name="dense_1"))
    sg.scan_layers(model, layers="dense")
    assert [_num_scans(model), _num_scans(model)] == [1, 1]  # only the first one was called


def test_layers_that_differ_are_refused() -> None:
    dense = keras.layers.Dense
    with pytest.raises(ValueError, match="differ in activation: 'linear' and 'relu'"):
        sg.scan_layers(_row(dense(4), dense(4, "relu")), layers="dense")
    with pytest.raises(ValueError, match="differ in units: 4 and 3"):
        sg.scan_layers(_row(dense(4), dense(3)), layers="dense")
    with pytest.raises(ValueError, match="differ in their classes, Dense and Dropout"):
        sg.scan_layers(row := _row(dense(4), keras.layers.Dropout(0.5)), layers=row.layers)
    frozen = dense(4)
    frozen.trainable = False
    with pytest.raises(ValueError, match="differ in trainable: True and False"):
        sg.scan_layers(_row(dense(4), frozen), layers="dense")
    model = decoder()
    _blocks(model)[1].dropout.rate = 0.25
    with pytest.raises(ValueError, match=r"'dropout.*', in .*rate: 0.5 and 0.25"):
        sg.scan_layers(model)
    with pytest.raises(ValueError, match="'block_0', which is in no row of layers"):
        sg.scan_layers(model, layers="block_0")
    with pytest.raises(ValueError, match="nothing to scan"):
        sg.scan_layers(dense(3))


class _Odd(keras.layers.Layer):
    """A layer whose `effect` no loop can repeat."""

    def __init__(self, effect: Callable[[Any, Any], Any], shared: Any = None) -> None:
        super().__init__()
        self.effect, self.shared = effect, shared

    def call(self, x: Any) -> Any:
        return self.effect(self, x)


class _Shift(keras.layers.Layer):
    """A layer that moves the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        return keras.ops.roll(x, 1, axis=1)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        return keras.ops.roll(previous_mask, 1, axis=1)


def _partly_recomputed() -> Any:
    sg.scan_layers(model := decoder())
    sg.remat(model, layers="block_1")
    return model


def _masked() -> Any:
    inputs = keras.Input((4, 4))
    model = keras.Model(inputs, _Shift()(_Shift()(keras.layers.Masking()(inputs))))
    sg.scan_layers(model, layers="shift")
    return model


def _scanned(make: Callable[[], Any]) -> Any:
    sg.scan_layers(model := _row(make(), make()), layers="dense|odd")
    return model


def _odd(effect: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    def make() -> Any:
        shared = keras.Variable(0.0, trainable=False)
        return _scanned(lambda: _Odd(effect, shared))

    return make


_OTHERS: dict[str, Any] = {}
_DENSE = {"units": 4, "activity_regularizer": "l2"}


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (_partly_recomputed, (2, 4), "only some are rematerialized"),
        (lambda: _scanned(lambda: keras.layers.Dense(**_DENSE)), (2, 4), "an activity regularizer"),
        (_masked, (2, 4, 4), "another mask than its input"),
        *(
            (_odd(effect), (2, 4), message)
            for effect, message in (
                (
                    lambda layer, x: (layer.shared.assign_add(1.0), x)[1],
                    "share .* and assign to it",
                ),
                (lambda _, x: (_OTHERS["counter"].assign_add(1.0), x)[1], "which is not its own"),
                (lambda _, x: keras.ops.cast(x, "float16"), "gets .* and returns .*float16"),
                (
                    lambda _, x: (sg.summary.scalar("sum", keras.ops.sum(x)), x)[1],
                    "a layer that writes summaries",
                ),
            )
        ),
    ],
    ids=["partly recomputed", "regularized", "masked", "shared", "global", "dtype", "summary"],
)
def test_layers_that_one_loop_cannot_compute_are_refused(make, shape, message, monkeypatch) -> None:
    monkeypatch.setitem(_OTHERS, "counter", keras.Variable(0.0, trainable=False))
    model = make()

    def call(x: Any) -> Any:
        with keras.StatelessScope():
            return model(x)

    with pytest.raises(ValueError, match=message):
        jax.make_jaxpr(call)(np.ones(shape, "float32"))


# Layers that write state of their own in a step of `fit`.


def _trained(scope: Scope, layer: Callable[[], Any], **compile_arguments: Any) -> Any:
    with scope():
        made = layer()
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((3,)), made, dense])
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse", **compile_arguments)
    return model, made


class _Counts(keras.layers.Layer):
    """Counts calls in one variable and rows in another, each by its aggregation."""

    def build(self, input_shape: Any) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls")
        self.largest = self.add_weight(
            shape=(), trainable=False, aggregation="mean", initializer="zeros", name="largest"
        )
        self.own = keras.Variable(
            jnp.zeros(()), trainable=False, synchronization="on_read", aggregation="sum"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
            self.largest.assign(keras.ops.max(inputs))
            self.own.assign_add(keras.ops.sum(inputs))
        return inputs


@pytest.mark.compatibility
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_state_of_a_layer_follows_its_annotations(steps_per_execution: int) -> None:
    x, y = regression(12)
    model, layer = _trained(
        lambda: mirrored(2).scope(), _Counts, steps_per_execution=steps_per_execution
    )
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert [int(copy) for copy in copies_of(layer.calls)] == [3, 3]
    np.testing.assert_allclose(
        float(layer.largest.value), (x[8:10].max() + x[10:].max()) / 2, rtol=1e-6
    )
    first = np.concatenate([x[0:2], x[4:6], x[8:10]]).sum()
    np.testing.assert_allclose(components_of(layer.own), [first, x.sum() - first], rtol=1e-5)
    np.testing.assert_allclose(float(layer.own.value), x.sum(), rtol=1e-5)


class _Drifts(keras.layers.Layer):
    """Keeps the mean of its inputs, which differs between replicas, without saying how."""

    def build(self, input_shape: Any) -> None:
        self.mean = self.add_weight(shape=(), trainable=False, initializer="zeros", name="mean")

    def call(self, inputs: Any) -> Any:
        self.mean.assign(keras.ops.mean(inputs))
        return inputs


@pytest.mark.compatibility
def test_state_that_would_drift_apart_is_refused() -> None:
    model, layer = _trained(lambda: mirrored(2).scope(), _Drifts)
    with pytest.raises(
        ValueError, match="mean', whose aggregation is NONE, a value that may differ"
    ):
        model.fit(*regression(), batch_size=4, verbose=0)
    assert values_of([layer.mean]) == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("is_adapted", [True, False])
def test_adapted_normalisation_is_that_of_one_device(is_adapted: bool) -> None:
    """And spectral normalisation."""
    initializer = keras.initializers.Orthogonal(2.0, seed=3)

    def made() -> Any:
        if not is_adapted:
            dense = keras.layers.Dense(3, kernel_initializer=initializer)
            return keras.layers.SpectralNormalization(dense)
        layer = keras.layers.Normalization()
        layer.adapt(regression()[0])
        return layer

    def job(scope: Scope) -> dict[str, Any]:
        return fitted(_trained(scope, made)[0], *regression(), batch_size=4)

    assert_like_plain_keras(job, replicas=(2,))
