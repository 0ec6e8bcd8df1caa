"""Outputs of exported signatures, by TensorFlow's names."""

from __future__ import annotations

import pytest

import stratagem as sg

export = sg.estimator.export


def test_outputs_by_the_names_of_tensorflow() -> None:
    assert export.PredictOutput(1).outputs == {"output": 1}
    assert export.PredictOutput({"a": 1}).outputs == {"a": 1}
    assert export.RegressionOutput(1).outputs == {"outputs": 1}
    assert export.ClassificationOutput(scores=1).outputs == {"scores": 1}
    assert export.ClassificationOutput(1, 2).outputs == {"scores": 1, "classes": 2}


def test_a_classification_has_something() -> None:
    with pytest.raises(
        ValueError, match="ClassificationOutput received neither scores nor classes"
    ):
        export.ClassificationOutput()
