"""Batches of input functions."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.loops.batches import HostTransforms, InputFunction, ModelBatches

STRATEGY = sg.OneDeviceStrategy("cpu:0")


def batches(input_fn, *, repeats=True):
    source = InputFunction(input_fn, "train", None, None, HostTransforms(), repeats=repeats)
    return ModelBatches(source, STRATEGY)


def test_features_and_labels_are_distinguished() -> None:
    x, y = np.arange(4.0, dtype="float32"), np.arange(4)
    pairs = list(batches(lambda: sg.input.Dataset((x, y), batch_size=2)))
    assert [(a.tolist(), b.tolist()) for a, b in pairs] == [([0, 1], [0, 1]), ([2, 3], [2, 3])]
    alone = list(batches(lambda: sg.input.Dataset({"x": x}, batch_size=2)))
    assert [(sorted(a), b) for a, b in alone] == [(["x"], None)] * 2


def test_a_generator_is_a_dataset_and_arrays_are_a_batch() -> None:
    x = np.zeros((3, 2), "float32")
    assert len(list(batches(lambda: ((x, x) for _ in range(5))))) == 5
    assert len(list(batches(lambda: (x, x), repeats=False))) == 1
    endless = batches(lambda: {"x": x})
    assert [next(endless)[0]["x"].shape for _ in range(3)] == [(3, 2)] * 3
    endless.close()


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match=r"input_fn=\[1\] of type list is not callable"):
        batches([1])


def test_batches_of_three_parts_are_refused() -> None:
    x = np.zeros(2, "float32")
    with pytest.raises(ValueError, match="input_fn returned batches of 3 elements"):
        next(batches(lambda: [(x, x, x)]))


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="input_fn returned an empty dataset"):
        batches(lambda: iter(())).first()
