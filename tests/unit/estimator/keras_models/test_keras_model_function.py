"""Copies of compiled Keras models."""

from __future__ import annotations

from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
from keras import layers

from stratagem.estimator.keras_models import KerasModelFunction
from stratagem.estimator.spec import ModelFunction

X = np.arange(12, dtype="float32").reshape(4, 3)
Y = X[:, :1]


@keras.saving.register_keras_serializable(package="tests")
class _Shift(layers.Layer):
    def call(self, x: Any) -> Any:
        return x + 1


def _model(*, dropout: float = 0.0) -> keras.Model:
    inputs = layers.Input((3,), name="numbers")
    hidden = layers.Dropout(dropout)(_Shift()(inputs))
    hidden = layers.Dense(4, kernel_regularizer="l2")(hidden)
    model = keras.Model(inputs, layers.Dense(1, name="sum")(hidden))
    model.compile(keras.optimizers.Adam(0.5), "mse", metrics=[keras.metrics.MeanSquaredError()])
    return model


def _function(model: keras.Model) -> KerasModelFunction:
    return KerasModelFunction(model, None, None, None)


def test_copy_has_the_configuration_and_other_variables() -> None:
    model = _model()
    copy = _function(model).copy()
    assert copy.get_config() == model.get_config()
    assert not copy.compiled
    ours, theirs = ({id(one) for one in each.variables} for each in (copy, model))
    assert len(ours) == len(theirs)
    assert not ours & theirs


def test_what_is_sent_makes_no_variable_before_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A variable would initialize JAX before the processes connect."""
    sent = cloudpickle.dumps(_function(_model()))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(keras.Variable, "__init__", fail)
        with pytest.raises(AssertionError):
            keras.optimizers.Adam()
        received = cloudpickle.loads(sent)
    assert float(received(X, Y, "train").loss) > 0


def test_spec_of_training_has_the_loss_of_the_model_and_a_copy_of_its_optimizer() -> None:
    model = _model()
    spec = _function(model)(X, Y, "train")
    copy = spec.train_op.variables
    assert [tuple(one.shape) for one in copy] == [tuple(v.shape) for v in model.trainable_variables]
    optimizer = spec.train_op.optimizer
    assert optimizer is not model.optimizer
    assert float(optimizer.learning_rate) == 0.5
    spec.scaffold.init_fn(None)  # now the copy has the weights of the model
    for one, given in zip(copy, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), given.numpy())
    assert sorted(spec.predictions) == ["sum"]
    assert not spec.eval_metric_ops


def test_spec_of_evaluation_has_metrics_that_are_updated() -> None:
    model = _model()
    metrics = _function(model)(X, Y, "eval").eval_metric_ops
    assert list(metrics) == ["mean_squared_error"]
    assert float(metrics["mean_squared_error"].count) == len(X)
    assert metrics["mean_squared_error"] is not model.metrics[1]


def test_layers_know_the_mode() -> None:
    function = _function(_model(dropout=0.5))
    alike = np.ones((64, 3), "float32")
    outputs = {
        mode: np.unique(function(alike, alike[:, :1], mode).predictions["sum"])
        for mode in ("train", "eval", "infer")
    }
    assert len(outputs["train"]) > 1  # not the same numbers are dropped of each row
    assert len(outputs["eval"]) == len(outputs["infer"]) == 1


def test_rate_of_the_optimizer_is_that_of_the_moment() -> None:
    model = _model()
    function = _function(model)
    model.optimizer.learning_rate = 0.25
    assert float(function(X, Y, "train").train_op.optimizer.learning_rate) == 0.5


def test_function_can_be_sent_to_another_process() -> None:
    sent = cloudpickle.loads(cloudpickle.dumps(_function(_model())))
    results = []
    for function in (sent, sent, _function(_model())):
        spec = function(X, Y, "train")
        spec.scaffold.init_fn(None)
        results.append([one.numpy() for one in spec.train_op.variables])
    assert [one.shape for one in results[0]] == [one.shape for one in results[2]]
    for first, second in zip(results[0], results[1], strict=True):
        np.testing.assert_array_equal(first, second)


def test_arguments_are_those_of_a_model_function() -> None:
    function = ModelFunction(_function(_model()), None, None)
    assert function.takes_labels
    assert function.gives_values
    assert function(X, Y, "eval").loss.shape == ()
