"""Models of clicks, and the law whose items come and go."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from examples.clicks.law import NUM_FIELDS
from examples.recommenders import ranking
from examples.recommenders.tables import Tables

_LAW = ranking.DriftingLaw(1_000, life=5_000)


def _vectors_and_model(name: str) -> tuple[np.ndarray, np.ndarray, keras.Model]:
    keras.utils.set_random_seed(1)
    model = ranking.build(name, Tables("vocabulary", 4), 50)
    ids = np.random.default_rng(0).integers(0, 50, (5, NUM_FIELDS)).astype(np.int32)
    numbers = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    return ids, numbers, model


def _dense(model: keras.Model, place: int, x: np.ndarray) -> np.ndarray:
    layers = [one for one in model.layers if isinstance(one, keras.layers.Dense)]
    kernel, bias = map(np.asarray, layers[place].weights)
    y = x @ kernel + bias
    return np.maximum(y, 0) if layers[place].activation is keras.activations.relu else y


def test_dlrm_has_the_inner_product_of_each_pair() -> None:
    ids, numbers, model = _vectors_and_model("dlrm")
    vectors = np.asarray(model.get_layer("table").weights[0])[ids]
    bottom = _dense(model, 1, _dense(model, 0, numbers))
    features = np.concatenate([vectors, bottom[:, None]], axis=1)
    pairs = [
        (features[:, one] * features[:, two]).sum(1)
        for one in range(NUM_FIELDS + 1)
        for two in range(one + 1, NUM_FIELDS + 1)
    ]
    top = np.concatenate([bottom, np.stack(pairs, axis=1)], axis=1)
    wanted = _dense(model, 3, _dense(model, 2, top))[:, 0]
    np.testing.assert_allclose(model({"ids": ids, "numbers": numbers}), wanted, rtol=2e-4)


def test_dcn_has_cross_layers_beside_a_deep_part() -> None:
    ids, numbers, model = _vectors_and_model("dcn")
    vectors = np.asarray(model.get_layer("table").weights[0])[ids]
    start = np.concatenate([vectors.reshape(5, -1), numbers], axis=1)
    first, second, *deep, last = sorted(
        (one for one in model.layers if isinstance(one, keras.layers.Dense)),
        key=lambda one: (one.units == 1, one.units != start.shape[1], -one.units),
    )

    def applied(layer: keras.layers.Dense, x: np.ndarray) -> np.ndarray:
        kernel, bias = map(np.asarray, layer.weights)
        return x @ kernel + bias

    candidates = []
    for one, two in ((first, second), (second, first)):  # in whichever order the model lists them
        crossed = start * applied(one, start) + start
        crossed = start * applied(two, crossed) + crossed
        hidden = start
        for layer in deep:
            hidden = np.maximum(applied(layer, hidden), 0)
        candidates.append(applied(last, np.concatenate([crossed, hidden], axis=1))[:, 0])
    found = np.asarray(model({"ids": ids, "numbers": numbers}))
    assert min(np.abs(found - one).max() for one in candidates) < 1e-4


def test_items_of_a_drifting_law_live_for_some_time() -> None:
    """Each rank has the same id for `life` examples, and then one that never was there."""
    lives: dict[int, list[int]] = {}
    for first in range(0, 20_000, 1_000):
        ids, _ = _LAW.features(first, 1_000)
        for place, row in enumerate(ids):
            for one in row.tolist():
                lives.setdefault(one, []).append(first + place)
    spans = [seen[-1] - seen[0] for seen in lives.values()]
    assert max(spans) < _LAW.life
    popular = [seen for seen in lives.values() if len(seen) > 500]
    assert max(seen[-1] - seen[0] for seen in popular) > 0.9 * _LAW.life
    assert any(seen[0] > 10_000 for seen in popular)
    assert max(lives) > 2**40


def test_drifting_ids_are_the_same_whoever_asks() -> None:
    whole, _ = _LAW.features(4_000, 3_000)
    part, _ = _LAW.features(5_000, 1_000)
    np.testing.assert_array_equal(whole[1_000:2_000], part)


@pytest.mark.parametrize("life", [1_000, 100_000])
def test_drifting_clicks_have_the_probabilities_of_the_law(life: int) -> None:
    law = ranking.DriftingLaw(1_000, life=life)
    features, labels = law.examples(0, 20_000)
    chances = law.probabilities(features["ids"], features["numbers"])
    error = np.sqrt((chances * (1 - chances)).sum()) / len(labels)
    assert abs(labels.mean() - chances.mean()) < 4 * error
