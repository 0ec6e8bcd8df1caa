"""Feature columns against values of TensorFlow 2.21 and NumPy, and invalid arguments."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.feature_column.columns import check_columns

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


def test_crosses_leave_out_combinations_without_a_value() -> None:
    column = fc.crossed_column(["a", fc.categorical_column_with_identity("b", 5)], 100)
    crossed = column.ids({"a": [["x", "y"], ["x"]], "b": [[1], [-1]]})
    assert crossed.shape == (2, 2)
    assert (crossed[0] >= 0).all()
    assert crossed[1].tolist() == [-1, -1]
    with pytest.raises(ValueError, match="examples"):
        column.ids({"a": ["x", "y"], "b": [1]})


def test_buckets_of_numbers_are_those_of_numpy() -> None:
    ages = np.array([[10.0, 18.0], [30.0, 70.0]], np.float32)
    source = fc.numeric_column("age", shape=(2,), normalizer_fn=lambda x: x / 2.0)
    column = fc.bucketized_column(source, [5.0, 20.0])
    expected = np.digitize(ages / 2.0, [5.0, 20.0]) + np.array([0, 3])
    np.testing.assert_array_equal(column.ids({"age": ages}), expected)
    ids, weights = column.ids_and_weights({"age": jnp.asarray(ages)})
    assert weights is None
    np.testing.assert_array_equal(ids, expected)
    one_hot = np.zeros((2, 6))
    one_hot[[[0], [1]], expected] = 1.0
    np.testing.assert_array_equal(column.numbers({"age": jnp.asarray(ages)}), one_hot)


def test_discretization_layer_of_keras_makes_the_same_buckets() -> None:
    column = fc.bucketized_column(fc.numeric_column("x"), [0.0, 1.0])
    values = np.array([-1.0, 0.0, 0.5, 1.0, 2.0], np.float32)
    expected = keras.layers.Discretization(bin_boundaries=[0.0, 1.0])(values)
    np.testing.assert_array_equal(column.ids({"x": values})[:, 0], expected)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.numeric_column("x", shape=(0,)), r"received shape=\(0,\)"),
        (lambda: fc.numeric_column("x", dtype="str"), "received dtype='str'"),
        (lambda: fc.numeric_column("x", (2,), default_value=[1, 2, 3]), "received default_value="),
        (lambda: fc.bucketized_column("x", [1]), "bucketized_column received 'x'"),
        (lambda: fc.bucketized_column(AGE, [2, 1]), r"received boundaries=\[2, 1\]"),
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
        (lambda: fc.categorical_column_with_hash_bucket("x", 1), "received hash_bucket_size=1"),
        (lambda: fc.crossed_column(["x"], 10), r"crossed_column received keys=\['x'\]"),
        (lambda: fc.crossed_column([CITY, "x"], 10), "crossed_column received HashedCateg"),
        (lambda: fc.weighted_categorical_column(AGE, "w"), "weighted_categorical_column received"),
        (lambda: fc.indicator_column(AGE), "indicator_column received NumericColumn"),
        (lambda: fc.embedding_column(CITY, 0), "received dimension=0"),
        (lambda: fc.embedding_column(CITY, 2, combiner="max"), "combiner='max'"),
        (
            lambda: fc.shared_embeddings(
                [CITY, fc.categorical_column_with_hash_bucket("y", 10)], 2
            ),
            r"shared_embeddings received columns with \[100, 10\] ids",
        ),
    ],
)
def test_columns_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_normalizer_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="received normalizer_fn=3"):
        fc.numeric_column("x", normalizer_fn=3)


def test_weights_of_another_shape_are_refused() -> None:
    ids = fc.categorical_column_with_identity("id", 3)
    column = fc.weighted_categorical_column(ids, "w")
    with pytest.raises(ValueError, match=r"Feature 'w' has shape \(1, 3\)"):
        column.encode({"id": [[1, 2]], "w": np.ones((1, 3))})


def test_embedding_without_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match="'city_embedding' was read without its table"):
        fc.embedding_column(CITY, 2).numbers({})
