"""Encoding of several columns at once, and columns that do not go together."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.feature_column.columns import check_columns

fc = sg.feature_column

FEATURES = {
    "city": np.array(["Paris", "Rome", ""]),
    "day": [1, 2, 3],
    "tags": [["a", "b"], ["c", ""], ["", ""]],
    "age": [[10.0], [30.0], [70.0]],
}
AGE = fc.numeric_column("age")
AGES = fc.bucketized_column(AGE, [18, 65])


def test_encoded_features_are_what_columns_read_and_no_more() -> None:
    city = fc.categorical_column_with_hash_bucket("city", 100)
    columns = [AGES, AGE, fc.indicator_column(city), fc.embedding_column(city, 2)]
    encoded = fc.encode_features(FEATURES, columns)
    assert set(encoded) == {"age", city.encoded_name}
    assert all(array.dtype.kind in "if" for array in encoded.values())


def test_columns_of_one_feature_travel_under_names_of_their_own() -> None:
    made = [
        fc.categorical_column_with_hash_bucket("city", 100),
        fc.categorical_column_with_hash_bucket("city", 50),
        fc.categorical_column_with_vocabulary_list("city", ["Rome"]),
    ]
    assert len({column.encoded_name for column in made}) == 3
    assert made[0].encoded_name == fc.categorical_column_with_hash_bucket("city", 100).encoded_name


def test_two_ways_to_read_one_feature_are_refused() -> None:
    other = fc.bucketized_column(fc.numeric_column("age", default_value=3.0), [18])
    with pytest.raises(ValueError, match="Two feature columns read 'age' differently"):
        fc.encode_features({"age": [1.0, None]}, [fc.numeric_column("age", default_value=1), other])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([], "feature_columns is empty"),
        (["age"], "feature_columns contains 'age'"),
        ([AGE, fc.numeric_column("age", dtype="int32")], "Two feature columns are named 'age'"),
    ],
)
def test_check_columns_names_what_is_wrong(columns, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_columns(columns)


CITY = fc.categorical_column_with_hash_bucket("city", 100)
