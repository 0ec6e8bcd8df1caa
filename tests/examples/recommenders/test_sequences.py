"""The law of sessions, and its model against NumPy."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from examples.recommenders import sequences
from examples.recommenders.tables import Tables

_LAW = sequences.SessionLaw(num_items=400, num_clusters=8, length=5)


def _cluster_of(items: np.ndarray) -> np.ndarray:
    clusters, ranks = np.meshgrid(np.arange(8), np.arange(50), indexing="ij")
    of_item = np.empty(400, np.int64)
    of_item[_LAW.item(clusters, ranks)] = clusters
    return of_item[items]


def test_each_item_is_in_one_cluster() -> None:
    clusters, ranks = np.meshgrid(np.arange(8), np.arange(50), indexing="ij")
    assert len(np.unique(_LAW.item(clusters, ranks))) == 400
    sessions, own = _LAW.examples(0, 100)
    np.testing.assert_array_equal(_cluster_of(sessions), own)


def test_clusters_follow_one_another_as_often_as_the_law_says() -> None:
    transitions = _LAW.transitions()
    np.testing.assert_allclose(transitions.sum(1), 1)
    _, clusters = _LAW.examples(0, 40_000)
    counts = np.zeros((8, 8))
    np.add.at(counts, (clusters[:, :-1].ravel(), clusters[:, 1:].ravel()), 1)
    totals = counts.sum(1, keepdims=True)
    error = np.sqrt(transitions * (1 - transitions) / totals)
    assert (np.abs(counts / totals - transitions) < 5 * error).all()


def test_candidates_have_the_frequencies_that_are_stated() -> None:
    chances = np.exp(_LAW.log_frequencies(np.arange(400)).astype(np.float64))
    assert chances.sum() == pytest.approx(1, abs=1e-5)
    found = np.bincount(_LAW.candidates(3, 100_000), minlength=400) / 100_000
    assert (np.abs(found - chances) < 5 * np.sqrt(chances / 100_000)).all()


def test_best_recall_is_that_of_the_most_probable_items() -> None:
    """Beside all 400 probabilities of each session."""
    sessions, clusters = _LAW.examples(sequences.HELD_OUT, 3_000)
    within = np.exp(_LAW.log_frequencies(np.arange(400))) * 8
    of_item = _cluster_of(np.arange(400))
    chances = _LAW.transitions()[clusters[:, -2]][:, of_item] * within
    best = np.argsort(-chances, axis=1, kind="stable")[:, :10]
    wanted = np.mean([last in row for last, row in zip(sessions[:, -1], best, strict=True)])
    assert _LAW.best_recall(3_000, 10) == pytest.approx(wanted, abs=0.003)  # equal chances


@pytest.mark.slow
def test_loss_is_a_softmax_over_candidates() -> None:
    keras.utils.set_random_seed(5)
    model = sequences.SessionModel(Tables("vocabulary", 4), _LAW)
    sessions, _ = _LAW.examples(0, 20)
    candidates = _LAW.candidates(0, 30)
    is_hit = candidates[None] == sessions[:, -1:]
    assert is_hit.any()
    losses = np.asarray(
        model(
            {
                "sessions": sessions[:, :-1],
                "items": sessions[:, -1],
                "candidates": np.broadcast_to(candidates, (20, 30)),
                "is_hit": is_hit,
            }
        )
    )
    vectors = np.asarray(model.sessions(sessions[:, :-1]))
    rows = np.asarray(model.outputs_table.weights[0])
    for row in range(20):
        own = vectors[row] @ rows[sessions[row, -1]]
        others = (rows[candidates] @ vectors[row])[~is_hit[row]]
        assert losses[row] == pytest.approx(
            np.log(np.exp(others).sum() + np.exp(own)) - own, rel=1e-4
        )
