"""The law of choices, and two towers against NumPy."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from scipy.special import logsumexp

import stratagem as sg
from examples.recommenders import retrieval
from examples.recommenders.tables import Tables

_LAW = retrieval.ChoiceLaw(num_items=40, num_values=20)


def test_items_are_taken_as_often_as_the_law_says() -> None:
    users, items = _LAW.examples(0, 20_000)
    scores = _LAW.scores(users).astype(np.float64)
    chances = np.exp(scores - logsumexp(scores, axis=1, keepdims=True))
    expected = chances.sum(0)
    error = np.sqrt((chances * (1 - chances)).sum(0))
    assert (np.abs(np.bincount(items, minlength=40) - expected) < 5 * error).all()
    np.testing.assert_allclose(_LAW.frequencies(), expected / 20_000, atol=1e-7)


def test_recall_counts_items_that_are_recommended() -> None:
    rng = np.random.default_rng(2)
    scores, items = rng.normal(size=(200, 30)), rng.integers(0, 30, 200)
    best = np.argsort(-scores, axis=1)[:, :7]
    wanted = np.mean([item in row for item, row in zip(items, best, strict=True)])
    assert retrieval.recall(scores, items, 7) == wanted


def test_no_order_has_a_larger_recall_than_the_law() -> None:
    users, items = _LAW.examples(retrieval.HELD_OUT, 5_000)
    best = _LAW.best_recall(5_000, 5)
    noisy = _LAW.scores(users) + np.random.default_rng(3).normal(size=(5_000, 40))
    assert retrieval.recall(noisy, items, 5) < best
    assert retrieval.recall(np.broadcast_to(_LAW.frequencies(), (5_000, 40)), items, 5) < best


def _features(count: int) -> dict[str, np.ndarray]:
    users, items = _LAW.examples(0, count)
    return {
        "users": users.astype(np.int32),
        "items": items.astype(np.int32),
        "names": items.astype(np.int32),
        "log_frequencies": np.log(_LAW.frequencies())[items],
    }


def _model() -> retrieval.TwoTowers:
    keras.utils.set_random_seed(4)
    return retrieval.TwoTowers(Tables("vocabulary", 4), _LAW)


@pytest.mark.slow
def test_loss_is_a_softmax_over_the_items_of_others() -> None:
    features, model = _features(30), _model()
    losses = np.asarray(model(features))
    users = np.asarray(model.users(features["users"]))
    items = np.asarray(model.items(features["items"]))
    scores = users @ items.T - features["log_frequencies"]
    assert len(set(features["names"].tolist())) < 30  # some were taken twice
    for row, name in enumerate(features["names"]):
        others = scores[row][features["names"] != name]
        wanted = np.log(np.exp(others).sum() + np.exp(scores[row, row])) - scores[row, row]
        assert losses[row] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
def test_candidates_are_those_of_all_replicas() -> None:
    """Two replicas train to the same weights as one, whose candidates are the whole batch."""
    results = []
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"]):
        with sg.MirroredStrategy(devices).scope():
            model = _model()
            model.compile(keras.optimizers.SGD(0.5), lambda _, losses: losses)
        model.fit(_features(64), np.zeros(64), batch_size=32, epochs=2, shuffle=False, verbose=0)
        results.append([np.asarray(one.value) for one in model.weights])
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)
