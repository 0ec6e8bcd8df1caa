"""Networks of pre-made Estimators against NumPy, and hidden layers that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.premade.premade_estimator import (
    EXAMPLES,
    BiasNetwork,
    DeepNetwork,
    LinearNetwork,
    Network,
)

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
COLUMNS = (sg.feature_column.numeric_column("x", shape=(3,)),)


def deep(**changes: Any) -> DeepNetwork:
    given: dict[str, Any] = {
        "feature_columns": COLUMNS,
        "hidden_units": [4, 2],
        "activation_fn": None,
        "dropout": None,
        "batch_norm": False,
    }
    return DeepNetwork(**{**given, **changes})


def test_hidden_layers_are_relu_of_products() -> None:
    logits, variables = deep().logits({"x": X}, 3, training=True)
    assert [variable.path for variable in variables] == [
        f"dnn/{layer}/{kind}"
        for layer in ("hiddenlayer_0", "hiddenlayer_1", "logits")
        for kind in ("kernel", "bias")
    ]
    values = [np.asarray(variable) for variable in variables]
    net = X
    for kernel, bias in ((values[0], values[1]), (values[2], values[3])):
        net = np.maximum(net @ kernel + bias, 0)
    np.testing.assert_allclose(logits, net @ values[4] + values[5], rtol=1e-5, atol=1e-6)


def test_dropout_is_for_training_alone() -> None:
    logits, variables = deep(hidden_units=[64], dropout=0.5).logits({"x": X}, 1, training=False)
    kernel, bias, last, _ = map(np.asarray, variables)
    expected = np.maximum(X @ kernel + bias, 0) @ last
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_batch_norm_adds_two_trained_vectors_for_each_hidden_layer() -> None:
    _, variables = deep(batch_norm=True).logits({"x": X}, 1, training=True)
    names = [variable.path.split("/")[1:] for variable in variables]
    assert [name for name in names if name[0].startswith("batchnorm")] == [
        ["batchnorm_0", "gamma"],
        ["batchnorm_0", "beta"],
        ["batchnorm_1", "gamma"],
        ["batchnorm_1", "beta"],
    ]


def test_linear_network_starts_at_zero_and_trains_weights_and_bias() -> None:
    network = LinearNetwork(feature_columns=COLUMNS, sparse_combiner="sum")
    logits, variables = network.logits({"x": X}, 2, training=True)
    np.testing.assert_array_equal(logits, np.zeros((5, 2)))
    assert sorted(tuple(variable.shape) for variable in variables) == [(2,), (3, 2)]


def test_bias_network_has_one_bias_for_all_examples() -> None:
    logits, variables = BiasNetwork().logits({EXAMPLES: np.ones(4)}, 3, training=True)
    assert logits.shape == (4, 3)
    assert [tuple(variable.shape) for variable in variables] == [(3,)]


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_units": []},
        {"hidden_units": [4, 0]},
        {"hidden_units": [-1]},
        {"dropout": 1.0},
        {"dropout": -0.1},
    ],
    ids=str,
)
def test_layers_that_cannot_be_are_refused(changes) -> None:
    with pytest.raises(ValueError, match="is out of range"):
        deep(**changes)
    assert deep(dropout=0.0).dropout == 0
    with pytest.raises(TypeError, match="abstract"):
        Network()  # pyright: ignore[reportAbstractUsage]
