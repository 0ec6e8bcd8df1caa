"""Searches for small models: what is best, what is refused, and what is printed."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

from stratagem import planning

_BATCH = (np.ones((16, 8), "float32"), np.ones((16, 8), "float32"))


def _model(count: int = 1) -> keras.Model:
    x = inputs = keras.Input((8,))
    for _ in range(count):
        layers = [keras.layers.Dense(8, dtype="mixed_bfloat16") for _ in range(2)]
        x = keras.Sequential(layers)(x)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def found() -> planning.PlanSearch:
    return planning.search(lambda: _model(2), _BATCH, "4xH100", count=3, compiles=False)


def test_a_small_model_is_replicated_as_it_is(found) -> None:
    assert found.best.code == "strategy = sg.MirroredStrategy()"
    assert found.best.candidate.mesh == (4, 1, 1)
    assert found.best.fits
    # Four policies; replicated, and two states on two meshes.
    assert found.num_candidates == 4 * (1 + 2 * 2)
    assert len(found.choices) == 3


def test_the_result_is_data_and_a_table(found) -> None:
    data = json.loads(json.dumps(found.to_dict()))
    assert data["choices"][0]["mesh"] == {"replica": 4, "shard": 1, "model": 1}
    assert data["choices"][0]["is_compiled"] is False
    text = str(found)
    assert "the best 3 of 20 settings" in text
    assert "1  strategy = sg.MirroredStrategy()" in text


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="search for 0 results"):
        planning.search(_model(), _BATCH, "2xH100", count=0)
    with pytest.raises(TypeError, match="is of type list"):
        planning.search(_model(), [*_BATCH], "2xH100")
    with pytest.raises(TypeError, match="received or built"):
        planning.search(lambda: 1, _BATCH, "2xH100")
    with pytest.raises(ValueError, match="batch of 16 cannot be split over 7"):
        planning.search(_model(), _BATCH, "7xH100")
