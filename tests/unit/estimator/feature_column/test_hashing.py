"""Hashed and crossed columns against ids of TensorFlow 2.21."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg

fc = sg.feature_column

# What tf.feature_column of TensorFlow 2.21 makes of these, by each column's get_sparse_tensors.
FEATURES = {
    "city": np.array(["Paris", "Rome", ""]),
    "day": [1, 2, 3],
    "tags": [["a", "b"], ["c", ""], ["", ""]],
    "age": [[10.0], [30.0], [70.0]],
}
AGE = fc.numeric_column("age")
AGES = fc.bucketized_column(AGE, [18, 65])
IDS_OF_TENSORFLOW = [
    (fc.categorical_column_with_hash_bucket("city", 100), [[50], [49], [-1]]),
    (fc.categorical_column_with_hash_bucket("day", 100, dtype="int64"), [[49], [59], [21]]),
    (fc.crossed_column(["city", "day"], 1000), [[516], [571], [537]]),
    (fc.crossed_column(["tags", "day"], 1000), [[485, 983], [523, 385], [537, 537]]),
    (fc.crossed_column([AGES, "tags"], 1000), [[95, 565], [731, 619], [909, 909]]),
    (
        fc.crossed_column(["city", fc.crossed_column([AGES, "day"], 10)], 1000, hash_key=7),
        [[999], [278], [966]],
    ),
]


@pytest.mark.parametrize(
    ("column", "expected"),
    IDS_OF_TENSORFLOW,
    ids=[f"{type(c).__name__}_{c.name}" for c, _ in IDS_OF_TENSORFLOW],
)
def test_ids_are_those_of_tensorflow(column, expected) -> None:
    ids = column.ids(FEATURES)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


def test_crosses_leave_out_combinations_without_a_value() -> None:
    column = fc.crossed_column(["a", fc.categorical_column_with_identity("b", 5)], 100)
    crossed = column.ids({"a": [["x", "y"], ["x"]], "b": [[1], [-1]]})
    assert crossed.shape == (2, 2)
    assert (crossed[0] >= 0).all()
    assert crossed[1].tolist() == [-1, -1]
    with pytest.raises(ValueError, match="examples"):
        column.ids({"a": ["x", "y"], "b": [1]})


CITY = fc.categorical_column_with_hash_bucket("city", 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.categorical_column_with_hash_bucket("x", 1), "received hash_bucket_size=1"),
        (lambda: fc.crossed_column(["x"], 10), r"crossed_column received keys=\['x'\]"),
        (lambda: fc.crossed_column([CITY, "x"], 10), "crossed_column received HashedCateg"),
    ],
)
def test_columns_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
