"""Notes on the part of a machine that a step uses."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.abstract_devices import planning_for
from stratagem.planning.targets import parse_target

_BATCH = (np.ones((32, 64), "float32"), np.zeros((32, 1), "float32"))


def _model() -> keras.Model:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    model.compile("sgd", "mse")
    return model


def test_replicas_span_hosts() -> None:
    layout_map = {".*kernel": (None, "logical")}
    with planning_for(parse_target("16xH100").topology):
        strategy = sg.MultiWorkerMirroredStrategy(devices_per_replica=16, layout_map=layout_map)
    plan = sg.plan(_model, _BATCH, "16xH100", strategy=strategy)
    assert (plan.num_replicas, plan.devices_per_replica) == (1, 16)
    assert not any("process" in note for note in plan.notes)


@pytest.mark.parametrize("place", ["sharded", "central"])
def test_process_does_not_span_hosts(place: str) -> None:
    strategy = sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"kernel": place})
    notes = " ".join(sg.plan(_model, _BATCH, "16xH100", strategy=strategy).notes)
    assert ("needs a process that has all devices" in notes) == (place == "central")
