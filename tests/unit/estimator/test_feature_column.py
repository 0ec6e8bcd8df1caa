"""Column layers against TensorFlow 2.21 and NumPy: values, gradients, saving and fit."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.premade.columns import categorical_rows, check_columns, numeric_rows

fc = sg.feature_column
IDS = fc.categorical_column_with_identity("id", 3)
WEIGHTED = fc.weighted_categorical_column(IDS, "w")
FEATURES = {"id": [[1, 2], [0, -1]], "w": [[0.5, 2.0], [3.0, 0.0]]}
TABLE = np.array([[1.0, 2.0], [3.0, 4.0], [-6.0, 8.0]], np.float32)

AGE = fc.numeric_column("age")
AGES = fc.bucketized_column(AGE, [18, 65])
CITY = fc.categorical_column_with_hash_bucket("city", 100)
RAW = {
    "city": np.array(["Paris", "Rome", ""]),
    "day": [1, 2, 3],
    "tags": [["a", "b"], ["c", ""], ["", ""]],
    "age": [[10.0], [30.0], [70.0]],
}
# What tf.feature_column of TensorFlow 2.21 makes of these, by each column's get_sparse_tensors.
IDS_OF_TENSORFLOW = [
    (
        fc.categorical_column_with_vocabulary_list("city", ["Rome"], num_oov_buckets=5),
        [[1], [0], [-1]],
    ),
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

# What tf.keras.layers.DenseFeatures of TensorFlow 2.21 makes of them with this table.
EMBEDDED = [
    (IDS, "mean", None, [-1.5, 6.0], [1.0, 2.0]),
    (IDS, "mean", 3.0, [0.0, 2.4], [1.0, 2.0]),
    (IDS, "sqrtn", None, [-2.12132, 8.485281], [1.0, 2.0]),
    (IDS, "sqrtn", 3.0, [0.0, 3.394112], [1.0, 2.0]),
    (IDS, "sum", None, [-3.0, 12.0], [1.0, 2.0]),
    (IDS, "sum", 3.0, [0.0, 4.8], [1.0, 2.0]),
    (WEIGHTED, "mean", None, [-4.2, 7.2], [1.0, 2.0]),
    (WEIGHTED, "mean", 3.0, [-1.08, 2.4], [1.0, 2.0]),
    (WEIGHTED, "sqrtn", None, [-5.093248, 8.731283], [1.0, 2.0]),
    (WEIGHTED, "sqrtn", 3.0, [-1.309692, 2.910428], [1.0, 2.0]),
    (WEIGHTED, "sum", None, [-10.5, 18.0], [3.0, 6.0]),
    (WEIGHTED, "sum", 3.0, [-2.7, 6.0], [3.0, 6.0]),
]


@pytest.mark.parametrize(("column", "combiner", "max_norm", "first", "second"), EMBEDDED)
def test_embedded_rows_are_those_of_tensorflow(column, combiner, max_norm, first, second) -> None:
    embedding = fc.embedding_column(
        column, 2, combiner, keras.initializers.Constant(TABLE), max_norm
    )
    made = fc.DenseFeatures([embedding])(FEATURES)
    np.testing.assert_allclose(made, [first, second], rtol=1e-5, atol=1e-6)


def test_indicators_are_those_of_tensorflow() -> None:
    plain = fc.DenseFeatures([fc.indicator_column(IDS)])(FEATURES)
    np.testing.assert_array_equal(plain, [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    weighted = fc.DenseFeatures([fc.indicator_column(WEIGHTED)])(FEATURES)
    np.testing.assert_array_equal(weighted, [[0.0, 0.5, 2.0], [3.0, 0.0, 0.0]])


@pytest.mark.slow
def test_example_without_values_is_zeros_and_trains_nothing() -> None:
    column = fc.embedding_column(IDS, 2, initializer=keras.initializers.Constant(TABLE), max_norm=1)
    layer = fc.DenseFeatures([column])
    layer({"id": [0]})
    encoded = fc.encode_features({"id": [[-1], [2]]}, [column])

    @sg.function
    def step():
        return sg.value_and_grad(lambda: keras.ops.sum(layer(encoded)), layer.trainable_variables)

    _, grads = step()
    (table_grad,) = (np.asarray(grad) for grad in grads)
    assert np.isfinite(table_grad).all()
    assert not table_grad[:2].any()
    assert table_grad[2].any()
    np.testing.assert_array_equal(layer(encoded)[0], [0.0, 0.0])


def test_columns_stand_in_the_order_of_their_names() -> None:
    columns = [fc.numeric_column("b"), fc.numeric_column("a", shape=(2,)), fc.indicator_column(IDS)]
    layer = fc.DenseFeatures(columns)
    made = layer({"b": [5.0], "a": [[1.0, 2.0]], "id": [1]})
    assert made.tolist() == [[1.0, 2.0, 5.0, 0.0, 1.0, 0.0]]
    assert layer.compute_output_shape(None) == (None, 6)


def test_shared_embeddings_have_one_table() -> None:
    seen, bought = (fc.categorical_column_with_identity(key, 3) for key in ("seen", "bought"))
    columns = fc.shared_embeddings(
        [seen, bought], 2, initializer=keras.initializers.Constant(TABLE)
    )
    layer = fc.DenseFeatures(columns)
    made = layer({"seen": [0], "bought": [2]})
    assert len(layer.weights) == 1
    np.testing.assert_array_equal(made, [[-6.0, 8.0, 1.0, 2.0]])


@pytest.mark.parametrize(("combiner", "of_two"), [("sum", 7.0), ("mean", 3.5)])
def test_linear_model_adds_weights_of_ids_and_numbers(combiner, of_two) -> None:
    age = fc.numeric_column("age", shape=(2,))
    ages = fc.bucketized_column(fc.numeric_column("old"), [50])
    layer = fc.LinearModel([age, IDS, ages], units=1, sparse_combiner=combiner)
    rows = {"age": [[1.0, 10.0]], "id": [[1, 2]], "old": [70]}
    assert np.asarray(layer(rows)).tolist() == [[0.0]]
    values = {"age_weights": [[1.0], [2.0]], "id_weights": [[0.0], [3.0], [4.0]]}
    values |= {"old_bucketized_weights": [[100.0], [1000.0]], "bias_weights": [0.5]}
    for variable in layer.weights:
        name = variable.name if "embeddings" not in variable.path else variable.path.split("/")[-2]
        variable.assign(np.asarray(values[name], np.float32))
    assert layer(rows).tolist() == [[0.5 + 21.0 + of_two + 1000.0]]


def test_linear_model_takes_dense_columns_with_tables() -> None:
    column = fc.embedding_column(IDS, 2, initializer=keras.initializers.Constant(TABLE))
    layer = fc.LinearModel([column], units=3)
    assert layer({"id": [0, 1]}).shape == (2, 3)
    assert sorted(tuple(variable.shape) for variable in layer.weights) == [(2, 3), (3,), (3, 2)]


def test_features_that_are_not_encoded_are_refused_in_a_step() -> None:
    layer = fc.DenseFeatures([fc.indicator_column(IDS)])
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match="A feature-column layer found no"):
        strategy.run(lambda ids: layer({"id": ids}), args=(np.array([0, 1], np.int32),))


def _model() -> keras.Model:
    city = fc.categorical_column_with_vocabulary_list("city", ["Rome", "Paris"], num_oov_buckets=1)
    columns = [
        fc.numeric_column("age"),
        fc.embedding_column(city, 2, initializer=keras.initializers.RandomNormal(seed=1)),
        fc.indicator_column(
            fc.crossed_column([city, fc.bucketized_column(fc.numeric_column("age"), [30.0])], 5)
        ),
    ]
    keras.utils.set_random_seed(0)
    return keras.Sequential([fc.DenseFeatures(columns), keras.layers.Dense(1)]), columns


ROWS = {"age": np.arange(12, dtype=np.float32) * 5, "city": np.array(["Rome", "Paris", "Oslo"] * 4)}
LABELS = np.arange(12, dtype=np.float32)[:, None] / 10


@pytest.mark.slow
def test_fit_trains_a_model_of_columns_on_encoded_features() -> None:
    def fitted(strategy) -> list[np.ndarray]:
        with strategy.scope():
            model, columns = _model()
            model.compile(optimizer=keras.optimizers.SGD(1e-4), loss="mse")
        x = fc.encode_features(ROWS, columns)
        model.fit(x, LABELS, batch_size=5, epochs=2, shuffle=False, verbose=0)
        return [np.asarray(variable) for variable in model.trainable_variables]

    one = fitted(sg.OneDeviceStrategy("cpu:0"))
    many = fitted(sg.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert len(one) == 3
    for first, second in zip(one, many, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)


def test_model_of_columns_comes_back_from_a_file(tmp_path) -> None:
    model, columns = _model()
    x = fc.encode_features(ROWS, columns)
    before = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), before, rtol=1e-6)
    np.testing.assert_array_equal(loaded.layers[0](ROWS), model.layers[0](ROWS))


def test_linear_model_comes_back_from_its_config() -> None:
    layer = fc.LinearModel([IDS, WEIGHTED], units=2, sparse_combiner="mean", name="wide")
    config = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == layer.get_config()


# Columns of ids and of vocabularies, from lists and from files.


@pytest.mark.parametrize(
    ("column", "expected"),
    IDS_OF_TENSORFLOW,
    ids=[f"{type(c).__name__}_{c.name}" for c, _ in IDS_OF_TENSORFLOW],
)
def test_ids_are_those_of_tensorflow(column, expected) -> None:
    ids = column.ids(RAW)
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
    with pytest.raises(ValueError, match="and its vocabulary of int have"):
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


# Raw features in every form become NumPy arrays with one row per example.


class Ragged:
    """Object with the `to_list` of ragged tensors and pandas columns."""

    def to_list(self) -> list[list[int]]:
        return [[1], [2, 3]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["a", "b"], [["a"], ["b"]]),
        (np.array(["a", "b"]), [["a"], ["b"]]),
        (np.array([b"a", b"b"]), [[b"a"], [b"b"]]),
        (np.array([["a", "b"]], object), [["a", "b"]]),
        ([["a"], ["b", "c", "d"], []], [["a", *[None] * 3], ["b", "c", "d", None], [None] * 4]),
        ([1, None], [[1], [None]]),
        (jnp.array([[1, 2]]), [[1, 2]]),
        (Ragged(), [[1, None], [2, 3]]),
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3, None]]),
        ([], []),
    ],
)
def test_categorical_rows_have_one_row_an_example(value, expected) -> None:
    rows = categorical_rows(value, "x")
    assert rows.ndim == 2
    assert rows.tolist() == expected


@pytest.mark.parametrize(
    ("value", "shape", "default", "expected"),
    [
        ([1, 2], (1,), None, [[1.0], [2.0]]),
        ([[1, 2]], (2,), None, [[1.0, 2.0]]),
        ([1, None], (1,), (7.0,), [[1.0], [7.0]]),
        ([[None, 2], [3, None]], (2,), (7.0, 8.0), [[7.0, 2.0], [3.0, 8.0]]),
        ([[None, 2]], (2,), (7.0,), [[7.0, 2.0]]),
        (np.array([True, False]), (1,), None, [[1.0], [0.0]]),
    ],
)
def test_numeric_rows_have_the_shape_of_their_column(value, shape, default, expected) -> None:
    rows = numeric_rows(value, "x", shape, default, "float32")
    assert rows.dtype == np.float32
    assert rows.tolist() == expected


# Hashed and crossed columns against ids of TensorFlow 2.21.


def test_crosses_leave_out_combinations_without_a_value() -> None:
    column = fc.crossed_column(["a", fc.categorical_column_with_identity("b", 5)], 100)
    crossed = column.ids({"a": [["x", "y"], ["x"]], "b": [[1], [-1]]})
    assert crossed.shape == (2, 2)
    assert (crossed[0] >= 0).all()
    assert crossed[1].tolist() == [-1, -1]
    with pytest.raises(ValueError, match="examples"):
        column.ids({"a": ["x", "y"], "b": [1]})


# Encoding of several columns at once, and columns that do not go together.


def test_encoded_features_are_what_columns_read_and_no_more() -> None:
    city = fc.categorical_column_with_hash_bucket("city", 100)
    columns = [AGES, AGE, fc.indicator_column(city), fc.embedding_column(city, 2)]
    encoded = fc.encode_features(RAW, columns)
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


# Numeric and bucketized columns against NumPy and Keras.


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


# What columns, layers and encodings refuse.

OTHER = fc.categorical_column_with_hash_bucket("y", 10)
INT_AGE = fc.numeric_column("age", dtype="int32")
AGE_OR_1, AGE_OR_3 = (fc.numeric_column("age", default_value=value) for value in (1, 3.0))
WRONG = [
    (lambda: fc.categorical_column_with_identity("x", 0), "num_buckets=0"),
    (lambda: fc.categorical_column_with_identity("x", None), "received num_buckets=None"),
    (lambda: fc.categorical_column_with_identity("x", 2, 2), "default_value=2"),
    (lambda: fc.categorical_column_with_vocabulary_list("x", ["a", "a"]), "received 2 words"),
    (lambda: fc.categorical_column_with_vocabulary_list("x", ["a", 1]), "words of types"),
    (lambda: fc.categorical_column_with_vocabulary_list("x", ["a"], "int64"), "dtype='int64'"),
    (
        lambda: fc.categorical_column_with_vocabulary_list("x", ["a"], None, 0, 1),
        "received num_oov_buckets=1",
    ),
    (
        lambda: fc.categorical_column_with_vocabulary_list("x", ["a"], default_value=3),
        "and default_value=3",
    ),
    (lambda: fc.categorical_column_with_hash_bucket("x", 1), "received hash_bucket_size=1"),
    (lambda: fc.categorical_column_with_hash_bucket("x", None), "received hash_bucket_size=None"),
    (lambda: fc.crossed_column(["x", "y"], None), "received hash_bucket_size=None"),
    (lambda: fc.crossed_column(["x"], 10), r"crossed_column received keys=\['x'\]"),
    (lambda: fc.crossed_column([CITY, "x"], 10), r"crossed_column received keys=\[HashedCateg"),
    (lambda: fc.numeric_column("x", shape=(0,)), r"received shape=\(0,\)"),
    (lambda: fc.numeric_column("x", dtype="str"), "dtype='str'"),
    (lambda: fc.numeric_column("x", (2,), default_value=[1, 2, 3]), "and default_value="),
    (lambda: fc.bucketized_column("x", [1]), "source_column='x' is of type str"),
    (lambda: fc.bucketized_column(AGE, [2, 1]), r"and boundaries=\[2, 1\]"),
    (lambda: fc.indicator_column(AGE), "indicator_column received A column=NumericColumn"),
    (lambda: fc.embedding_column(CITY, 0), "dimension=0"),
    (lambda: fc.embedding_column(CITY, None), "received dimension=None"),
    (lambda: fc.embedding_column(CITY, 2, "max"), "received combiner='max'"),
    (lambda: fc.shared_embeddings([CITY], None), "received dimension=None"),
    (lambda: fc.shared_embeddings([CITY, OTHER], 2), r"received columns with \[100, 10\] ids"),
    (lambda: fc.weighted_categorical_column(AGE, "w"), "weighted_categorical_column received"),
    (lambda: fc.DenseFeatures([IDS]), "received the categorical column 'id'"),
    (lambda: fc.LinearModel([IDS], sparse_combiner="max"), "received sparse_combiner='max'"),
    (lambda: fc.LinearModel([IDS], units=0), "units=0"),
    (lambda: fc.LinearModel([IDS], units=None), "received units=None"),
    (
        lambda: fc.DenseFeatures([fc.indicator_column(IDS)])(np.zeros(2)),
        "features=.* is of type ndarray",
    ),
    (lambda: fc.encode_features({"y": [1]}, [AGE]), "Feature 'age' is missing from the features"),
    (
        lambda: fc.encode_features(
            {"age": [1.0, None]}, [AGE_OR_1, fc.bucketized_column(AGE_OR_3, [18])]
        ),
        "Two feature columns read 'age' differently",
    ),
    (lambda: IDS.ids({"id": [5]}), "Feature 'id' contains 5"),
    (lambda: IDS.ids({"id": ["a"]}), "of an identity column contains strings"),
    (
        lambda: WEIGHTED.encode({"id": [[1, 2]], "w": np.ones((1, 3))}),
        r"Feature 'w' has shape \(1, 3\)",
    ),
    (lambda: check_columns([]), "feature_columns is empty"),
    (lambda: check_columns(["age"]), "feature_columns contains 'age'"),
    (lambda: check_columns([AGE, INT_AGE]), "Two feature columns are named 'age'"),
    (lambda: categorical_rows(np.zeros((2, 2, 2), int), "x"), "a categorical column has shape"),
    (lambda: categorical_rows(np.array(1), "x"), "a categorical column has shape"),
    (lambda: categorical_rows([1.5, 2.5], "x"), "a categorical column has dtype"),
    (lambda: categorical_rows([True, False], "x"), "a categorical column has dtype"),
    (lambda: categorical_rows([["a", 1.5], ["b"]], "x"), "a categorical column has dtype"),
    (lambda: numeric_rows(["a"], "x", (1,), (0.0,), "float32"), "a numeric column has dtype"),
    (lambda: numeric_rows(["a", None], "x", (1,), (0.0,), "float32"), "numeric column has dtype"),
    (lambda: numeric_rows([1.0, None], "x", (1,), None, "float32"), "has 1 missing values"),
    (lambda: numeric_rows(np.zeros((2, 3)), "x", (2,), None, "float32"), r"has shape \(2, 3\)"),
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_is_refused(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make()
