"""Columns of ids and of vocabularies, from lists and from files."""

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
IDS_OF_TENSORFLOW = [
    (
        fc.categorical_column_with_vocabulary_list("city", ["Rome"], num_oov_buckets=5),
        [[1], [0], [-1]],
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


def test_vocabulary_gives_places_a_default_and_none() -> None:
    words = ["red", "green"]
    rows = {"color": [["green", "red"], [b"green", "blue"], ["", None]]}
    plain = fc.categorical_column_with_vocabulary_list("color", words)
    assert plain.ids(rows).tolist() == [[1, 0], [1, -1], [-1, -1]]
    other = fc.categorical_column_with_vocabulary_list("color", words, default_value=0)
    assert other.ids(rows).tolist() == [[1, 0], [1, 0], [-1, -1]]
    assert (plain.num_buckets, other.name) == (2, "color")


def test_vocabulary_of_integers_takes_integers_alone() -> None:
    column = fc.categorical_column_with_vocabulary_list("year", np.array([1999, 2024]))
    assert column.ids({"year": [2024, 3, -1]}).tolist() == [[1], [-1], [-1]]
    with pytest.raises(ValueError, match="and its vocabulary have different types"):
        column.ids({"year": ["2024"]})


def test_vocabulary_file_is_a_list_of_its_first_lines(tmp_path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("red\ngreen\nblue\n", encoding="utf-8")
    whole = fc.categorical_column_with_vocabulary_file("color", path)
    first = fc.categorical_column_with_vocabulary_file("color", path, vocabulary_size=2)
    rows = {"color": ["blue", "green"]}
    assert whole.ids(rows).tolist() == [[2], [1]]
    assert first.ids(rows).tolist() == [[-1], [1]]
    with pytest.raises(ValueError, match=r"vocabulary_size=4 does not fit the 3 lines of"):
        fc.categorical_column_with_vocabulary_file("color", path, vocabulary_size=4)
    path.write_text("7\n9\n", encoding="utf-8")
    numbers = fc.categorical_column_with_vocabulary_file("n", path, dtype="int64")
    assert numbers.ids({"n": [9]}).tolist() == [[1]]


def test_identity_keeps_ids_and_replaces_others() -> None:
    column = fc.categorical_column_with_identity("id", 3, default_value=0)
    assert column.ids({"id": [[2, -1], [5, None]]}).tolist() == [[2, -1], [0, -1]]
    assert column.ids({"id": np.array([-7, 1])}).tolist() == [[0], [1]]
    strict = fc.categorical_column_with_identity("id", 3)
    with pytest.raises(ValueError, match="Feature 'id' contains 5"):
        strict.ids({"id": [5]})
    with pytest.raises(ValueError, match="of an identity column contains strings"):
        strict.ids({"id": ["5"]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.categorical_column_with_identity("x", 0), "received num_buckets=0"),
        (lambda: fc.categorical_column_with_identity("x", 2, 2), "default_value=2"),
        (lambda: fc.categorical_column_with_vocabulary_list("x", ["a", "a"]), "received 2 words"),
        (lambda: fc.categorical_column_with_vocabulary_list("x", ["a", 1]), "words of types"),
        (
            lambda: fc.categorical_column_with_vocabulary_list("x", ["a"], dtype="int64"),
            "dtype='int64'",
        ),
        (
            lambda: fc.categorical_column_with_vocabulary_list("x", ["a"], None, 0, 1),
            "received num_oov_buckets=1",
        ),
        (
            lambda: fc.categorical_column_with_vocabulary_list("x", ["a"], default_value=3),
            "The vocabulary of 'x' received default_value=3",
        ),
    ],
)
def test_columns_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
