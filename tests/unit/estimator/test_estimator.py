"""Arguments of Estimators, and the end of training."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.estimator.model_functions import (
    dataset_of,
    dense_classifier,
    estimator_of,
    examples,
    weights_of,
)

X, Y = examples(16)
DATA = dataset_of(X, Y, 4)


def step_of(estimator) -> int:
    return int(estimator.get_variable_value("global_step"))


@pytest.mark.slow
def test_steps_are_more_and_max_steps_are_all(tmp_path) -> None:
    estimator = estimator_of(dense_classifier, tmp_path)
    calls = []

    def input_fn():
        calls.append(1)
        return DATA()

    assert step_of(estimator.train(input_fn, steps=2)) == 2
    assert step_of(estimator.train(input_fn, steps=2)) == 4
    assert step_of(estimator.train(input_fn, max_steps=5)) == 5
    assert len(calls) == 3
    assert step_of(estimator.train(input_fn, max_steps=5)) == 5
    assert len(calls) == 3  # there was nothing to do
    assert step_of(estimator.train(input_fn)) == 9  # to the end of the data


def test_arrays_are_the_same_batch_in_each_step(tmp_path) -> None:
    estimator = estimator_of(dense_classifier, tmp_path)
    assert step_of(estimator.train(lambda: (X, Y), steps=3)) == 3


@pytest.mark.slow
def test_one_seed_gives_one_training(tmp_path) -> None:
    def model_fn(features, labels, mode):
        logits = keras.layers.Dense(3)(keras.layers.Dropout(0.5)(features))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
        return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.SGD(0.1))

    kernels = [
        estimator_of(model_fn, tmp_path / name, tf_random_seed=seed)
        .train(DATA)
        .get_variable_value("dense/kernel")
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    ]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert np.abs(kernels[0] - kernels[2]).max() > 1e-3


@pytest.mark.slow
def test_input_fn_gets_what_it_takes(tmp_path) -> None:
    seen = []

    def input_fn(mode, params, config, input_context):
        seen.append((mode, params, config.model_dir, input_context.num_replicas_in_sync))
        return DATA()

    estimator = sg.estimator.Estimator(
        lambda features, labels, mode, params: dense_classifier(features, labels, mode),
        tmp_path,
        sg.estimator.RunConfig(train_distribute=sg.MirroredStrategy(["cpu:0", "cpu:1"])),
        params={"size": 3},
    )
    estimator.train(input_fn)
    estimator.evaluate(input_fn)
    assert seen == [
        ("train", {"size": 3}, str(tmp_path), 2),
        ("eval", {"size": 3}, str(tmp_path), 1),
    ]


def test_folders_config_and_params(tmp_path) -> None:
    params = {"sizes": [1]}
    estimator = sg.estimator.Estimator(
        lambda features, labels, mode, params: params, tmp_path, params=params
    )
    params["sizes"].append(2)
    estimator.params["sizes"].append(3)
    assert estimator.params == {"sizes": [1]}
    assert estimator.model_dir == estimator.config.model_dir == str(tmp_path)
    assert estimator.eval_dir() == str(tmp_path / "eval")
    assert estimator.eval_dir("test") == str(tmp_path / "eval_test")
    assert estimator.latest_checkpoint() is None
    of_config = sg.estimator.RunConfig(model_dir=str(tmp_path))
    assert sg.estimator.Estimator(dense_classifier, config=of_config).model_dir == str(tmp_path)
    one, other = (sg.estimator.Estimator(dense_classifier).model_dir for _ in range(2))
    assert one != other


@pytest.mark.slow
def test_model_fn_can_be_called_by_another_model_function(tmp_path) -> None:
    inner = estimator_of(dense_classifier, tmp_path / "inner")

    def model_fn(features, labels, mode, config):
        spec = inner.model_fn(features, labels, mode, config)
        metrics = {**spec.eval_metric_ops, "mean": keras.metrics.Mean()}
        metrics["mean"].update_state(features)
        return sg.estimator.EstimatorSpec(
            mode, loss=spec.loss, train_op=spec.train_op, eval_metric_ops=metrics
        )

    outer = estimator_of(model_fn, tmp_path / "outer").train(DATA)
    assert outer.evaluate(DATA)["mean"] == pytest.approx(X.mean(), abs=1e-6)
    trained = weights_of(inner.train(DATA))
    for name, value in weights_of(outer).items():
        np.testing.assert_allclose(value, trained[name], atol=1e-6)


def test_layers_may_be_kept_outside(tmp_path) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        layer = keras.layers.Dense(3, name="outside", kernel_initializer="zeros")
        layer.build((None, 5))

    def model_fn(features, labels, mode):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, layer(features))
        return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.SGD(0.1))

    estimator = estimator_of(model_fn, tmp_path, strategy).train(DATA, steps=1)
    model = keras.Sequential([keras.layers.Dense(3, kernel_initializer="zeros")])
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.train_on_batch(X[:8], Y[:8])
    np.testing.assert_allclose(
        estimator.get_variable_value("outside/kernel"),
        np.asarray(model.layers[0].kernel.value),
        atol=1e-6,
    )


@pytest.mark.slow
def test_a_whole_training_runs_op_by_op(tmp_path) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    compiled = estimator_of(dense_classifier, tmp_path / "compiled", strategy)
    compiled.train(dataset_of(X, Y, 4))
    sg.config.run_eagerly(True)
    try:
        eager = estimator_of(dense_classifier, tmp_path / "eager", strategy)
        eager.train(dataset_of(X, Y, 4))
    finally:
        sg.config.run_eagerly(False)
    expected = weights_of(compiled)
    for name, value in weights_of(eager).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5)


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"max_steps": -1}])
def test_numbers_of_steps_are_positive(arguments, tmp_path) -> None:
    estimator = estimator_of(dense_classifier, tmp_path)
    with pytest.raises(ValueError, match=r"steps=(0|-1) is out of range"):
        estimator.train(DATA, **arguments)
    with pytest.raises(ValueError, match=r"steps=(0|-1) is out of range"):
        estimator.evaluate(DATA, steps=0)


def test_steps_and_max_steps_exclude_each_other(tmp_path) -> None:
    with pytest.raises(ValueError, match="steps=1 and max_steps=2 are both set"):
        estimator_of(dense_classifier, tmp_path).train(DATA, steps=1, max_steps=2)


def test_nothing_works_before_training(tmp_path) -> None:
    estimator = estimator_of(dense_classifier, tmp_path)
    receiver = sg.estimator.export.build_raw_serving_input_receiver_fn({"x": X})
    for call in (
        lambda: estimator.evaluate(DATA),
        lambda: next(estimator.predict(DATA)),
        lambda: estimator.export_saved_model(tmp_path, receiver),
        estimator.get_variable_names,
        lambda: estimator.get_variable_value("global_step"),
    ):
        with pytest.raises(ValueError, match="contains no checkpoint"):
            call()


def test_unknown_variables_are_refused(tmp_path) -> None:
    estimator = estimator_of(dense_classifier, tmp_path).train(DATA, steps=1)
    assert estimator.get_variable_value("global_step:0") == 1
    with pytest.raises(ValueError, match="contains no variable named 'kernel'"):
        estimator.get_variable_value("kernel")


def test_two_folders_are_refused(tmp_path) -> None:
    config = sg.estimator.RunConfig(model_dir=str(tmp_path / "a"))
    with pytest.raises(ValueError, match="differs from the config's model_dir"):
        sg.estimator.Estimator(dense_classifier, tmp_path / "b", config)


def test_an_evaluator_needs_the_folder_of_the_training(monkeypatch, tmp_path) -> None:
    cluster = {"chief": ["a:1"], "evaluator": ["b:1"]}
    task = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(ValueError, match="The evaluator task has no model_dir"):
        sg.estimator.Estimator(dense_classifier)
    assert sg.estimator.Estimator(dense_classifier, tmp_path).model_dir == str(tmp_path)


def test_a_config_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"an sg\.estimator\.RunConfig or None"):
        sg.estimator.Estimator(dense_classifier, config={"model_dir": "a"})


def test_subclasses_may_not_override_members() -> None:
    class Own(sg.estimator.Estimator):
        def train(self, input_fn):
            return self

    class Fine(sg.estimator.Estimator):
        def extra(self):
            return self.model_dir

    with pytest.raises(ValueError, match=r"Own overrides the Estimator members \['train'\]"):
        Own(dense_classifier)
    assert Fine(dense_classifier).extra()


def test_hooks_of_another_type_are_refused(tmp_path) -> None:
    with pytest.raises(TypeError, match=r"hooks=\(3,\) is not a list of SessionRunHook objects"):
        estimator_of(dense_classifier, tmp_path).train(DATA, hooks=[3])


def test_labels_that_are_not_taken_are_refused(tmp_path) -> None:
    def model_fn(features, mode):
        return dense_classifier(features, None, mode)

    with pytest.raises(ValueError, match="input_fn returns labels, but model_fn does not"):
        estimator_of(model_fn, tmp_path).train(DATA)


def test_a_loss_that_no_variable_changes_is_refused(tmp_path) -> None:
    def model_fn(features, labels, mode):
        keras.layers.Dense(1)(features)
        loss = keras.ops.mean(features)
        unused = keras.layers.Dense(2, name="unused")
        unused.build((None, 2))
        train_op = sg.estimator.minimize(keras.optimizers.SGD(), loss, [unused.kernel])
        return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    with pytest.raises(ValueError, match="depends on none of the variables"):
        estimator_of(model_fn, tmp_path).train(lambda: sg.input.Dataset(X, batch_size=4))
