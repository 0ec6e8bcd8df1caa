"""Arguments and labels that every pre-made Estimator refuses."""

from __future__ import annotations

import pytest

import stratagem as sg
from tests.unit.estimator.premade.rows import (
    FEATURES,
    NAMES,
    NUMBERS,
    batches,
    deep_columns,
    wide_columns,
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.DNNClassifier([4], []), "feature_columns is empty"),
        (
            lambda e: e.LinearRegressor(deep_columns(), optimizer=lambda: "x").train(
                batches(NUMBERS, 8), steps=1
            ),
            "optimizer='x' is not an optimizer",
        ),
        (
            lambda e: e.LinearClassifier(wide_columns()).train(lambda: FEATURES),
            "input_fn returned labels of type NoneType",
        ),
        (
            lambda e: e.LinearClassifier(wide_columns()).train(lambda: (FEATURES, NAMES)),
            "do not fit label_vocabulary=None",
        ),
    ],
)  # fmt: skip
def test_misuse_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(sg.estimator)
