"""Data of the pre-made Estimators' tests, with hand-encoded columns, and their strategies."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import stratagem as sg

CITIES = ["Oslo", "Paris", "Rome"]
COUNT = 22  # in batches of 8 the last one is short, and some of 4 replicas get none of it

_random = np.random.default_rng(0)
FEATURES: dict[str, Any] = {
    "age": _random.uniform(0, 100, COUNT).astype(np.float32),
    "city": np.array(CITIES)[_random.integers(0, 3, COUNT)],
    "w": _random.uniform(0.5, 2.0, COUNT).astype(np.float32),
}
CLASSES = (FEATURES["age"] > 50).astype(int) + (FEATURES["city"] == "Rome")
NAMES = np.array(["low", "middle", "high"])[CLASSES]
NUMBERS = (FEATURES["age"] / 10 + CLASSES).astype(np.float32)


def deep_columns() -> list[Any]:
    city = sg.feature_column.categorical_column_with_vocabulary_list("city", CITIES)
    return [
        sg.feature_column.numeric_column("age", normalizer_fn=lambda x: x / 100.0),
        sg.feature_column.embedding_column(city, dimension=2),
    ]


def wide_columns() -> list[Any]:
    city = sg.feature_column.categorical_column_with_vocabulary_list("city", CITIES)
    ages = sg.feature_column.bucketized_column(sg.feature_column.numeric_column("age"), [25, 75])
    return [city, ages, sg.feature_column.crossed_column([city, ages], 7)]


def encoded_by_hand() -> dict[str, np.ndarray]:
    """Returns inputs of plain Keras models: numbers, ids and one-hot rows."""
    city = np.array([CITIES.index(name) for name in FEATURES["city"]])
    bucket = np.digitize(FEATURES["age"], [25, 75])
    crossed = wide_columns()[2].ids(FEATURES)[:, 0]  # compared with TensorFlow's elsewhere
    one_hot = [np.eye(size)[ids] for size, ids in ((3, city), (3, bucket), (7, crossed))]
    # Linear models order columns by name: age_bucketized, age_bucketized_X_city, city.
    wide = np.hstack([one_hot[1], one_hot[2], one_hot[0]]).astype(np.float32)
    return {"age": FEATURES["age"][:, None] / np.float32(100), "city": city, "wide": wide}


def batches(labels: Any, size: int):
    """Input function with dicts of strings and numbers, and raw labels."""

    def input_fn():
        for start in range(0, COUNT, size):
            rows = slice(start, start + size)
            yield {key: value[rows] for key, value in FEATURES.items()}, labels[rows]

    return input_fn


def plain_deep_logits(x: dict[str, Any], units: int, hidden: list[int]) -> Any:
    table = keras.layers.Embedding(3, 2, name="city_embedding")(x["city"])
    net = keras.layers.Concatenate()([x["age"], table])
    for number, size in enumerate(hidden):
        net = keras.layers.Dense(size, activation="relu", name=f"hiddenlayer_{number}")(net)
    return keras.layers.Dense(units, name="logits")(net)


def inputs() -> dict[str, Any]:
    return {
        "age": keras.Input((1,), name="age"),
        "city": keras.Input((), dtype="int32", name="city"),
        "wide": keras.Input((13,), name="wide"),
    }


# Strategies and weights of the tests of pre-made Estimators.


GLOBAL_BATCH = 8
VOCABULARY = ["low", "middle", "high"]


def config(strategy=None) -> sg.estimator.RunConfig:
    return sg.estimator.RunConfig(
        tf_random_seed=3, train_distribute=strategy, eval_distribute=strategy
    )


def first_weights(make, labels, folder, **optimizers) -> dict[str, np.ndarray]:
    """Returns the initial weights of an Estimator with this seed."""
    still = {name: keras.optimizers.SGD(0.0) for name in optimizers}
    estimator = make(config=config(), model_dir=str(folder / "first"), **still)
    estimator.train(batches(labels, GLOBAL_BATCH), steps=1)
    return weights_of(estimator)


def weights_of(estimator) -> dict[str, np.ndarray]:
    names = [name for name in estimator.get_variable_names() if name.startswith(("dnn", "linear/"))]
    return {name: estimator.get_variable_value(name) for name in names}


def set_deep_weights(model: keras.Model, weights: dict[str, np.ndarray]) -> None:
    for variable in model.trainable_variables:
        variable.assign(weights[deep_name(variable)])


def deep_name(variable) -> str:
    is_table = variable.path.startswith("city_embedding")
    return f"dnn/{'input_layer/' if is_table else ''}{variable.path}"


def rows_of(x: dict[str, np.ndarray], start: int) -> dict[str, np.ndarray]:
    return {key: value[start : start + GLOBAL_BATCH] for key, value in x.items()}
