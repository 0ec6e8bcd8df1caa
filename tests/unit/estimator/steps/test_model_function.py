"""Model functions receive their arguments and are checked."""

from __future__ import annotations

import functools

import pytest

import stratagem as sg
from stratagem.estimator.steps.model_function import ModelFunction, arguments_of

SPEC = sg.estimator.EstimatorSpec("infer", predictions=1.0)


def test_arguments_are_passed_by_name() -> None:
    seen = []

    def model_fn(mode, features, *, config, params, labels):
        seen.append((mode, features, labels, params, config))
        return SPEC

    assert ModelFunction(model_fn, {"a": 1}, "config")("x", "y", "train") is SPEC
    assert ModelFunction(lambda features: SPEC, None, None)("x", None, "infer") is SPEC
    assert seen == [("train", "x", "y", {"a": 1}, "config")]


def test_what_partial_has_given_is_no_argument() -> None:
    def model_fn(features, size):
        return SPEC

    assert arguments_of(functools.partial(model_fn, size=3)) == ("features",)


@pytest.mark.parametrize(
    ("function", "params", "match"),
    [
        (None, None, "model_fn=None is not callable"),
        (lambda labels: SPEC, None, "but not `features`"),
        (lambda features: SPEC, {"a": 1}, "model_fn does not take params="),
        (lambda features, size: SPEC, None, r"model_fn takes the unsupported arguments \['size'\]"),
    ],
)
def test_other_functions_are_refused(function, params, match) -> None:
    with pytest.raises(ValueError, match=match):
        ModelFunction(function, params, None)


def test_labels_have_to_be_taken() -> None:
    with pytest.raises(ValueError, match="input_fn returns labels, but model_fn does not"):
        ModelFunction(lambda features: SPEC, None, None)("x", "y", "train")


def test_a_spec_has_to_be_returned() -> None:
    with pytest.raises(ValueError, match="model_fn returned 3 of type int"):
        ModelFunction(lambda features: 3, None, None)("x", None, "train")
