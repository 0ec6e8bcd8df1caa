"""Workloads of small models, compared with arithmetic."""

from __future__ import annotations

import keras

from stratagem.devices.abstract_devices import placeholder
from stratagem.planning.candidates import Form
from stratagem.planning.search import workload_of
from stratagem.planning.targets import parse_target


def test_a_model_with_adam() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, use_bias=False)])
    model.compile("adam", "mse")
    batch = placeholder((16, 8), "float32"), placeholder((16, 4), "float32")
    work = workload_of(model, batch, parse_target("2xH100"), [Form()])
    assert (work.num_examples, work.global_batch) == (8, 16)
    assert work.example_bytes == 4 * (8 + 4)
    assert [one.shape for one in work.weights if one.is_trained] == [(8, 4)]
    assert sum(one.slot_bytes for one in work.weights) == 2 * 4 * 32 + 8
    assert [one.shape for one in work.block] == [(8, 4)]
    # The product, and that for the gradient of the weight.
    assert work.costs[Form(), 1].flops == 2 * 2 * 8 * 8 * 4
