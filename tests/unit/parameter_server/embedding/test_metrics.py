"""AUC by buckets: its bounds contain the exact AUC, whatever the data and the replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import stratagem as sg
from examples.clicks.law import area_under_curve

_ROUNDING = 1e-12
_SCORES = st.floats(0, 1, width=32)


def _counted(labels: Any, scores: Any, **options: Any) -> sg.embedding.AUC:
    metric = sg.embedding.AUC(**options)
    metric.update_state(np.asarray(labels, "float32"), np.asarray(scores, "float32"))
    return metric


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    scores=arrays.arrays(np.float32, 64, elements=_SCORES),
    labels=arrays.arrays(np.float32, 64, elements=st.sampled_from([0.0, 1.0])),
    num_buckets=st.sampled_from([2, 3, 64]),
)
def test_bounds_contain_the_exact_auc(
    scores: np.ndarray, labels: np.ndarray, num_buckets: int
) -> None:
    labels[0], labels[1] = 0, 1
    metric = _counted(labels, scores, num_buckets=num_buckets)
    exact = area_under_curve(labels, scores)
    low, high = metric.bounds()
    assert low - _ROUNDING <= exact <= high + _ROUNDING
    assert abs(float(metric.result()) - exact) <= metric.error_bound() + 1e-6
    assert high - low <= 2 * metric.error_bound() + _ROUNDING


@pytest.mark.parametrize(("is_best", "end"), [(True, 1), (False, 0)])
def test_each_bound_is_attained(is_best: bool, end: int) -> None:
    # In both buckets, all positives are above all negatives, or below.
    scores = np.array([0.1, 0.2, 0.3, 0.6, 0.7, 0.8], np.float32)
    labels = np.array([0, 1, 1, 0, 0, 1] if is_best else [1, 1, 0, 1, 0, 0], np.float32)
    metric = _counted(labels, scores, num_buckets=2)
    assert metric.bounds()[end] == pytest.approx(area_under_curve(labels, scores), abs=1e-12)
    assert metric.error_bound() > 0.2


@pytest.mark.slow
def test_bounds_are_narrow_on_clicks_of_a_known_law() -> None:
    from examples.clicks.law import ClickLaw

    law = ClickLaw(10_000)
    features, labels = law.examples(0, 20_000)
    logits = law.logits(features["ids"], features["numbers"])
    probabilities = law.probabilities(features["ids"], features["numbers"])
    exact = area_under_curve(labels, probabilities)
    by_probability = _counted(labels, probabilities)
    by_logit = _counted(labels, logits, from_logits=True)
    for metric in (by_probability, by_logit):
        assert abs(float(metric.result()) - exact) <= metric.error_bound() < 2e-4


@pytest.mark.slow
def test_whole_weights_count_examples_several_times_and_zero_leaves_them_out() -> None:
    labels, scores = [0, 1, 1, 0], [0.2, 0.3, 0.9, 0.5]
    weighted = sg.embedding.AUC(num_buckets=7)
    weighted.update_state(
        np.array(labels)[:, None], np.array(scores)[:, None], sample_weight=np.array([1, 3, 1, 0])
    )
    repeated = _counted([0, 1, 1, 1, 1], [0.2, 0.3, 0.3, 0.3, 0.9], num_buckets=7)
    assert weighted.bounds() == repeated.bounds()
    assert float(weighted.result()) == float(repeated.result())


@pytest.mark.parametrize("shape", [pytest.param((2, 1), marks=pytest.mark.slow), (2,)])
def test_weights_of_examples_count_for_each_of_their_predictions(shape: tuple[int, ...]) -> None:
    metric = sg.embedding.AUC(num_buckets=4)
    weights = np.array([2, 1]).reshape(shape)
    metric.update_state(np.eye(2), np.array([[0.9, 0.1], [0.3, 0.6]]), sample_weight=weights)
    counts = np.asarray(metric.rest)
    assert counts.tolist() == [[0, 0, 1, 2], [2, 1, 0, 0]]
    alone = sg.embedding.AUC(num_buckets=4)
    alone.update_state(np.array([0, 1]), np.array([0.1, 0.9]), sample_weight=weights)
    assert np.asarray(alone.rest).tolist() == [[0, 0, 0, 1], [2, 0, 0, 0]]


def test_counts_beyond_the_exact_integers_of_float32_are_exact() -> None:
    metric = sg.embedding.AUC(num_buckets=2)
    many = float(2**24)
    metric.update_state([1.0], [0.1], sample_weight=[many])
    for _ in range(3):
        metric.update_state([1.0, 0.0], [0.1, 0.9], sample_weight=[1.0, 1.0])
    positive = np.asarray(metric.carried) + np.asarray(metric.rest, float)
    assert positive[0, 0] == many + 3


@pytest.mark.parametrize("number", [1, 3])
def test_counts_are_the_same_on_any_number_of_replicas(number: int) -> None:
    x = np.linspace(-2, 2, 50, dtype="float32")[:, None]
    y = (np.sin(40 * x) > 0).astype("float32")
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(number)])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Activation("sigmoid")])
        metric = sg.embedding.AUC(num_buckets=16)
        model.compile(loss="mse", metrics=[metric])
    logs = model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    alone = _counted(y[:, 0], 1 / (1 + np.exp(-x[:, 0])), num_buckets=16)
    assert metric.bounds() == alone.bounds()
    assert logs["auc"] == pytest.approx(float(alone.result()), abs=1e-6)


def test_a_class_that_is_missing_says_nothing() -> None:
    assert _counted([1, 1], [0.2, 0.4]).bounds() == (0.0, 1.0)


def test_a_prediction_that_is_not_a_number_is_not_hidden() -> None:
    assert np.isnan(float(_counted([1, 0], [np.nan, 0.4]).result()))


def test_configuration_makes_the_metric_again() -> None:
    metric = sg.embedding.AUC(num_buckets=12, from_logits=True, name="clicks")
    again = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert isinstance(again, sg.embedding.AUC)
    assert again.get_config() == metric.get_config()


def test_one_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 buckets"):
        sg.embedding.AUC(num_buckets=1)
