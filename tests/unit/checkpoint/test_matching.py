"""Variables are matched to arrays by name in dicts, and by path and shape in models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg


def variables(**values: Any) -> dict[str, Any]:
    return {
        name.replace("__", "/"): keras.Variable(np.asarray(value, "float32"), name="v")
        for name, value in values.items()
    }


def test_values_are_found_by_name_in_any_order_and_some_may_be_left_out(tmp_path) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        saved = variables(a__kernel=[1.0, 2.0], a__bias=3.0, b=4.0)
    path = sg.train.Checkpoint(model=saved).write(tmp_path / "ckpt")
    some = variables(b=0.0, a__kernel=[0.0, 0.0])
    sg.train.Checkpoint(model=some).read(path)
    assert {name: one.value.tolist() for name, one in some.items()} == {
        "b": 4.0,
        "a/kernel": [1.0, 2.0],
    }


def test_names_that_were_not_saved_are_refused_and_nothing_is_changed(tmp_path) -> None:
    path = sg.train.Checkpoint(model=variables(a=1.0, b=2.0)).write(tmp_path / "ckpt")
    other = variables(a=0.0, c=0.0)  # as many, which for a layer would do
    with pytest.raises(ValueError, match=r"Not in the checkpoint: c\. Only there: b"):
        sg.train.Checkpoint(model=other).read(path)
    assert float(other["a"].value) == 0.0


def test_another_shape_is_refused(tmp_path) -> None:
    path = sg.train.Checkpoint(model=variables(a=1.0)).write(tmp_path / "ckpt")
    with pytest.raises(ValueError, match=r"model/a has shape \(2,\) here but \(\) in"):
        sg.train.Checkpoint(model=variables(a=[1.0, 2.0])).read(path)


def dense(units: int = 3, inputs: int = 2, count: int = 1) -> keras.Model:
    layers = [keras.layers.Dense(units) for _ in range(count)]
    return keras.Sequential([keras.layers.Input((inputs,)), *layers])


def test_another_shape_names_the_path_and_both_shapes(tmp_path: Path) -> None:
    path = sg.train.Checkpoint(model=dense(3)).save(tmp_path / "ckpt")
    other = dense(4)
    before = [np.asarray(variable.value) for variable in other.variables]
    with pytest.raises(ValueError, match="has shape") as caught:
        sg.train.Checkpoint(model=other).restore(path)
    assert re.search(
        r"model/trainable_variables/\S*kernel.* has shape \(2, 4\) here but \(2, 3\) in .*ckpt-1",
        str(caught.value),
    )
    for variable, value in zip(other.variables, before, strict=True):
        np.testing.assert_array_equal(variable.value, value)


def test_another_model_names_the_missing_variables(tmp_path: Path) -> None:
    path = sg.train.Checkpoint(model=dense(count=1)).save(tmp_path / "ckpt")
    with pytest.raises(ValueError, match=r"holds 2 variables of model, which has 4"):
        sg.train.Checkpoint(model=dense(count=2)).restore(path)
