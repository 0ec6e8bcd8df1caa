"""Strategies and weights of the tests of pre-made Estimators."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.estimator.premade.rows import batches

GLOBAL_BATCH = 8
VOCABULARY = ["low", "middle", "high"]
STRATEGIES = [
    pytest.param(lambda: None, 1, id="no strategy", marks=pytest.mark.slow),
    pytest.param(lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]), 2, id="mirrored 2"),
    pytest.param(
        lambda: sg.MirroredStrategy([f"cpu:{i}" for i in range(4)]),
        4,
        id="mirrored 4",
        marks=pytest.mark.slow,
    ),
]
of_strategies = pytest.mark.parametrize(("make", "num_replicas"), STRATEGIES)


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
