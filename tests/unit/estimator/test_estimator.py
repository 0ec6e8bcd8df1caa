"""Arguments of Estimators, and the end of training."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.estimator import warm_start
from stratagem.estimator.steps import VariableStore
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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.train(DATA, steps=0), ValueError, "steps=0"),
        (lambda e: e.train(DATA, max_steps=-1), ValueError, "steps=-1"),
        (lambda e: e.evaluate(DATA, steps=-2), ValueError, "steps=-2"),
        (
            lambda e: e.train(DATA, steps=1, max_steps=2),
            ValueError,
            "train received steps=1 and max_steps=2",
        ),
        (
            lambda e: e.train(DATA, hooks=[3]),
            TypeError,
            r"hooks=\(3,\)(?s:.)*a list or tuple of Ses",
        ),
    ],
)
def test_calls_that_cannot_be_are_refused(call, error, message, tmp_path) -> None:
    with pytest.raises(error, match=message):
        call(estimator_of(dense_classifier, tmp_path))


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


def test_an_evaluator_needs_the_folder_of_the_training(monkeypatch, tmp_path) -> None:
    cluster = {"chief": ["a:1"], "evaluator": ["b:1"]}
    task = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(ValueError, match="The evaluator task has no model_dir"):
        sg.estimator.Estimator(dense_classifier)
    assert sg.estimator.Estimator(dense_classifier, tmp_path).model_dir == str(tmp_path)


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


def test_configs_that_cannot_be_are_refused(tmp_path) -> None:
    config = sg.estimator.RunConfig(model_dir=str(tmp_path / "a"))
    with pytest.raises(ValueError, match="differs from the config's model_dir"):
        sg.estimator.Estimator(dense_classifier, tmp_path / "b", config)
    with pytest.raises(TypeError, match=r"config=.* is of type dict\.\nExpected an sg\.est"):
        sg.estimator.Estimator(dense_classifier, config={"model_dir": "a"})


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


# Warm start from another training run.

Settings = sg.estimator.WarmStartSettings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    def model_fn(features, labels, mode):
        hidden = keras.layers.Dense(2, name="hidden")(features)
        loss = keras.ops.mean(keras.layers.Dense(1, name="output")(hidden) ** 2)
        train_op = keras.optimizers.SGD(0.1, momentum=0.9)
        return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator = sg.estimator.Estimator(model_fn, tmp_path_factory.mktemp("model"))
    x = np.ones((4, 3), "float32")
    return estimator.train(lambda: sg.input.Dataset(x, batch_size=2))


def store_of(*names: str):
    """Variables of zeros, named like the trained model's by default."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    store = VariableStore(strategy)
    with strategy.scope(), store.call("train"):
        for name in names or ("hidden", "output"):
            with keras.name_scope(name):
                shape = (2, 1) if name.startswith("output") else (3, 2)
                keras.Variable("zeros", shape=shape, name="kernel")
                keras.Variable("zeros", shape=shape[1:], name="bias", trainable=False)
    return store


def assert_changed(store, trained, names: dict[str, str]) -> None:
    """These variables have the trained model's values of those names, and others are zero."""
    for name, variable in store.named.items():
        if name in names:
            expected = trained.get_variable_value(names[name])
            np.testing.assert_array_equal(variable.numpy(), expected)
        else:
            assert not variable.numpy().any()


HIDDEN, OUTPUT, BIAS = "hidden/kernel", "output/kernel", "hidden/bias"


@pytest.mark.parametrize(
    ("names", "chosen", "renamed", "changed"),
    [
        ((), "hidden", None, {HIDDEN: HIDDEN}),
        ((), [BIAS, OUTPUT], None, {BIAS: BIAS, OUTPUT: OUTPUT}),  # a list chooses that too
        (
            ("first", "second"),
            ".*",
            {"first/kernel": HIDDEN, "second/kernel": HIDDEN},
            {"first/kernel": HIDDEN, "second/kernel": HIDDEN},
        ),
    ],
)
def test_what_is_chosen_begins_with_the_values_of_a_checkpoint(
    trained, names, chosen, renamed, changed
) -> None:
    store = store_of(*names)
    if isinstance(chosen, list):  # expressions and variables
        chosen = [chosen[0], store.find(chosen[1])]
    warm_start(store, Settings(trained.latest_checkpoint(), chosen, None, renamed))
    assert_changed(store, trained, changed)


def test_all_that_is_trained_begins_with_the_values_of_a_folder(trained) -> None:
    store = store_of()
    again = sg.estimator.Estimator(lambda features: None, warm_start_from=trained.model_dir)
    assert again._warm_start == Settings(trained.model_dir)
    warm_start(store, again._warm_start)
    assert_changed(store, trained, {HIDDEN: HIDDEN, OUTPUT: OUTPUT})


@pytest.mark.slow
def test_an_estimator_begins_with_them_only_without_checkpoints_of_its_own(
    trained, tmp_path
) -> None:
    data = lambda: sg.input.Dataset(np.ones((4, 3), "float32"), batch_size=2)  # noqa: E731
    config = sg.estimator.RunConfig(tf_random_seed=1)
    other = sg.estimator.Estimator(
        trained._function.function, tmp_path, config, warm_start_from=trained.model_dir
    )
    expected = trained.evaluate(data)
    results = other.evaluate(data)
    assert (results["loss"], results["global_step"]) == (expected["loss"], 0)
    other.train(data, steps=1)
    assert other.get_variable_value("global_step") == 1
    own = other.evaluate(data)
    assert own["loss"] != expected["loss"]
    again = sg.estimator.Estimator(
        trained._function.function, tmp_path, config, warm_start_from=trained.model_dir
    )
    assert again.evaluate(data) == own


@pytest.mark.parametrize(
    ("names", "chosen", "renamed", "message"),
    [
        ((), "nothing", None, "matches no variable"),
        ((), "hidden", {"other": "hidden"}, r"name received the unknown names \['other'\]"),
        (("other",), ".*", None, "Not in the checkpoint: other/kernel"),
    ],
)
def test_what_a_folder_cannot_give_is_refused(trained, names, chosen, renamed, message) -> None:
    with pytest.raises(ValueError, match=message):
        warm_start(store_of(*names), Settings(trained.model_dir, chosen, None, renamed))


def test_vocabularies_and_folders_without_checkpoints_are_refused(tmp_path) -> None:
    with pytest.raises(NotImplementedError, match=r"var_name_to_vocab_info=.* is not supported"):
        Settings("model", var_name_to_vocab_info={"table": object()})
    with pytest.raises(ValueError, match="is neither an Estimator's checkpoint nor the"):
        warm_start(store_of(), Settings(str(tmp_path)))


# add_metrics evaluates extra metrics in addition to existing ones.

ROWS = np.arange(6, dtype="float32")
LINE = (2 * ROWS + 1)[:, None]
WEIGHTS = np.array([1, 0, 1, 0, 2, 0], "float32")


def _data() -> Any:
    return sg.input.Dataset(({"x": ROWS, "weight": WEIGHTS}, LINE), batch_size=2)


def _weighted_error(features: Any, labels: Any, predictions: Any) -> dict[str, Any]:
    metric = keras.metrics.MeanAbsoluteError()
    metric.update_state(labels, predictions["predictions"], features["weight"])
    return {"weighted": metric}


@pytest.mark.slow
def test_metric_of_features_labels_and_predictions_under_a_strategy() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    columns = [sg.feature_column.numeric_column(name) for name in ("x", "weight")]
    plain = sg.estimator.LinearRegressor(
        columns, config=sg.estimator.RunConfig(eval_distribute=strategy)
    )
    plain.train(_data)
    estimator = sg.estimator.add_metrics(plain, _weighted_error)

    results, before = estimator.evaluate(_data), plain.evaluate(_data)
    rows = np.stack([row["predictions"] for row in plain.predict(_data)])
    expected = np.sum(WEIGHTS[:, None] * np.abs(rows - LINE)) / WEIGHTS.sum()
    assert results.pop("weighted") == pytest.approx(expected, rel=1e-5)
    assert results == pytest.approx(before)
    assert estimator.model_dir == plain.model_dir


def test_metric_of_a_keras_model_that_is_not_trained() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="line")])
    model.compile("sgd", "mse", metrics=["mae"])

    def metric(predictions, config):
        assert config.save_summary_steps == 100
        mean = keras.metrics.Mean()
        mean.update_state(predictions["line"])
        return {"mae": mean}

    estimator = sg.estimator.add_metrics(sg.estimator.model_to_estimator(model), metric)
    results = estimator.evaluate(lambda: (ROWS[:, None], LINE))
    assert results["mae"] == pytest.approx(np.mean(np.asarray(model(ROWS[:, None]))), rel=1e-5)


def test_metric_function_of_other_arguments_is_refused() -> None:
    estimator = sg.estimator.LinearRegressor([sg.feature_column.numeric_column("x")])
    with pytest.raises(ValueError, match=r"metric_fn received the unknown names \['logits'\]"):
        sg.estimator.add_metrics(estimator, lambda logits: {})


# The global step variable.


def test_there_is_one_for_each_strategy() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        assert sg.train.get_global_step() is None
        step = sg.train.get_or_create_global_step()
        assert sg.train.get_or_create_global_step() is step
        assert sg.estimator.get_global_step() is step
        assert (step.dtype, int(step)) == ("int32", 0)
    with sg.OneDeviceStrategy("cpu:0").scope():
        assert sg.train.get_global_step() is None


def test_in_a_model_function_it_is_that_of_the_estimator(tmp_path) -> None:
    seen, values = [], []

    def model_fn(features, labels, mode):
        sg.estimator.identity(sg.train.get_global_step().value, name="before")
        seen.append(sg.train.get_or_create_global_step() is sg.train.get_global_step())
        return dense_classifier(features, labels, mode)

    class Steps(sg.estimator.SessionRunHook):
        def before_run(self, run_context):
            return sg.estimator.SessionRunArgs(["before", "global_step", "global_step:0"])

        def after_run(self, run_context, run_values):
            values.append([int(value) for value in run_values.results])

    x, y = examples(6)
    estimator_of(model_fn, tmp_path).train(dataset_of(x, y, 2), hooks=[Steps()])
    assert values == [[0, 1, 1], [1, 2, 2], [2, 3, 3]]
    assert all(seen)
