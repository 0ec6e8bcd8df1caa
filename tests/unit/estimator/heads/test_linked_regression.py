"""Losses of the Poisson and logistic regression heads."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.heads.regression import LogisticRegressionHead, PoissonRegressionHead

LOGITS = np.array([[-1.0], [0.0], [1.5]], "float32")


def test_poisson_loss_is_the_negative_log_of_the_probability() -> None:
    counts = np.array([[0.0], [1.0], [6.0]], "float32")
    loss = PoissonRegressionHead().loss(counts, LOGITS)
    rates = np.exp(LOGITS)
    exact = rates - counts * LOGITS + [[math.lgamma(count + 1)] for count in counts[:, 0]]
    # Stirling's approximation of log 6! is off by 1/72.
    assert float(loss) == pytest.approx(exact.mean(), abs=1 / 72 / 3 + 1e-5)
    assert float(loss) < exact.mean()


def test_poisson_loss_without_what_no_gradient_needs() -> None:
    counts = np.array([[0.0], [1.0], [6.0]], "float32")
    part, full = PoissonRegressionHead(compute_full_loss=False), PoissonRegressionHead()
    assert float(part.loss(counts, LOGITS)) == pytest.approx(
        float(np.mean(np.exp(LOGITS) - counts * LOGITS)), rel=1e-5
    )
    for head in (part, full):
        grads = jax.grad(lambda logits, head=head: head.loss(counts, logits))(LOGITS)
        np.testing.assert_allclose(grads, (np.exp(LOGITS) - counts) / 3, rtol=1e-5)


def test_logistic_loss_is_the_crossentropy_of_a_proportion() -> None:
    shares = np.array([[0.0], [0.25], [1.0]], "float32")
    p = 1 / (1 + np.exp(-LOGITS))
    expected = -np.mean(shares * np.log(p) + (1 - shares) * np.log(1 - p))
    assert float(LogisticRegressionHead().loss(shares, LOGITS)) == pytest.approx(expected, rel=1e-5)


def test_predictions_are_means() -> None:
    counted = PoissonRegressionHead().predictions(LOGITS)
    np.testing.assert_allclose(counted["predictions"], np.exp(LOGITS), rtol=1e-6)
    shared = LogisticRegressionHead().predictions(LOGITS)
    np.testing.assert_allclose(shared["predictions"], 1 / (1 + np.exp(-LOGITS)), rtol=1e-6)
    np.testing.assert_array_equal(shared["logits"], LOGITS)


def test_estimator_with_such_a_head_finds_the_mean() -> None:
    counts = np.array([[2.0], [3.0], [4.0], [3.0]], "float32")
    head = PoissonRegressionHead()
    estimator = sg.estimator.BaselineEstimator(head, optimizer="SGD")
    estimator.train(lambda: ({"x": np.zeros(4)}, counts), steps=60)
    results = estimator.evaluate(lambda: ({"x": np.zeros(4)}, counts))
    assert results["prediction/mean"] == pytest.approx(3, rel=1e-3)


def test_labels_outside_the_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Labels of a Poisson regression include -1\.0"):
        PoissonRegressionHead().encode_labels([[2], [-1]])
    with pytest.raises(ValueError, match=r"a logistic regression range from 0\.0 to 2\.0"):
        LogisticRegressionHead().encode_labels([[0], [2]])
