"""Column layers against TensorFlow 2.21 and NumPy: values, gradients, saving and fit."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg

fc = sg.feature_column
IDS = fc.categorical_column_with_identity("id", 3)
WEIGHTED = fc.weighted_categorical_column(IDS, "w")
FEATURES = {"id": [[1, 2], [0, -1]], "w": [[0.5, 2.0], [3.0, 0.0]]}
TABLE = np.array([[1.0, 2.0], [3.0, 4.0], [-6.0, 8.0]], np.float32)

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


def test_indicator_counts_as_category_encoding_of_keras() -> None:
    rows = np.array([[1, 2], [0, 0]])
    encoding = keras.layers.CategoryEncoding(num_tokens=3, output_mode="count")
    made = fc.DenseFeatures([fc.indicator_column(IDS)])({"id": rows})
    np.testing.assert_array_equal(made, encoding(rows))


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


def test_dense_features_refuse_categorical_columns() -> None:
    with pytest.raises(ValueError, match="received the categorical column 'id'"):
        fc.DenseFeatures([IDS])


def test_linear_model_refuses_another_combiner() -> None:
    with pytest.raises(ValueError, match="sparse_combiner='max'"):
        fc.LinearModel([IDS], sparse_combiner="max")


def test_layers_refuse_features_that_are_no_dict() -> None:
    with pytest.raises(ValueError, match="features is of type ndarray"):
        fc.DenseFeatures([fc.indicator_column(IDS)])(np.zeros(2))


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


ROWS = {
    "age": np.arange(12, dtype=np.float32) * 5,
    "city": np.array(["Rome", "Paris", "Oslo"] * 4),
}
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
