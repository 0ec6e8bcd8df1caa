"""Searches for small models: what is best, what is refused, and what is printed."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem import planning
from stratagem.devices.abstract_devices import planning_for

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


@pytest.mark.parametrize("is_of_keras", [True, False])
def test_layouts_divide_weights_and_their_slots(is_of_keras: bool) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(4096, name="wide")])
        model.compile("adam", "mse")
        return model

    layout_map: Any = {".*wide/kernel": (None, "logical")}
    with planning_for(planning.parse_target("4xH100").topology):
        if is_of_keras:
            mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"))
            layout_map = keras.distribution.LayoutMap(mesh)
            layout_map[".*wide/kernel"] = (None, "model")
        strategy = sg.MirroredStrategy(devices_per_replica=2, layout_map=layout_map)
    batch = (np.ones((16, 256), "float32"), np.ones((16, 4096), "float32"))
    found = planning.search(build, batch, "4xH100", count=100, strategy=strategy, compiles=False)
    state = {
        choice.candidate.mesh: choice.memory_bytes
        for choice in found.choices
        if choice.candidate.shard_state is None and choice.candidate.form == planning.Form()
    }
    assert {mesh[2] for mesh in state} >= {1, 2}
    # Of the weight, its gradient and two slots, a device has half.
    halved = 4 * 4 * 256 * 4096 / 2
    assert state[4, 1, 1] - state[2, 1, 2] == pytest.approx(halved, rel=0.05)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="search for 0 results"):
        planning.search(_model(), _BATCH, "2xH100", count=0)
    with pytest.raises(TypeError, match="is of type list"):
        planning.search(_model(), [*_BATCH], "2xH100")
    with pytest.raises(TypeError, match="received or built"):
        planning.search(lambda: 1, _BATCH, "2xH100")
    with pytest.raises(ValueError, match="batch of 16 cannot be split over 7"):
        planning.search(_model(), _BATCH, "7xH100")
