"""Weighted columns refuse weights that do not fit their ids."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg

fc = sg.feature_column
AGE = fc.numeric_column("age")
CITY = fc.categorical_column_with_hash_bucket("city", 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.weighted_categorical_column(AGE, "w"), "weighted_categorical_column received"),
    ],
)
def test_columns_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_weights_of_another_shape_are_refused() -> None:
    ids = fc.categorical_column_with_identity("id", 3)
    column = fc.weighted_categorical_column(ids, "w")
    with pytest.raises(ValueError, match=r"Feature 'w' has shape \(1, 3\)"):
        column.encode({"id": [[1, 2]], "w": np.ones((1, 3))})
