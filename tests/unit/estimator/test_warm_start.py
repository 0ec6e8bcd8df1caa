"""Warm start from another training run."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.estimator import as_warm_start, warm_start
from stratagem.estimator.steps.variable_store import VariableStore

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


def changed(store, trained, renamed=None) -> list[str]:
    """Returns the names of variables with the trained model's values; others must be zero."""
    found = []
    for name, variable in store.named.items():
        saved = (renamed or {}).get(name, name)
        if np.array_equal(variable.numpy(), trained.get_variable_value(saved)):
            found.append(name)
        else:
            assert not variable.numpy().any()
    return sorted(found)


def test_all_that_is_trained_begins_with_the_values_of_a_folder(trained) -> None:
    store = store_of()
    settings = as_warm_start(trained.model_dir)
    assert settings == Settings(trained.model_dir)
    warm_start(store, settings)
    assert changed(store, trained) == ["hidden/kernel", "output/kernel"]


def test_expressions_choose_and_a_list_of_them_also_what_is_not_trained(trained) -> None:
    path = trained.latest_checkpoint()
    store = store_of()
    warm_start(store, Settings(path, "hidden"))
    assert changed(store, trained) == ["hidden/kernel"]
    store = store_of()
    warm_start(store, Settings(path, ["hidden/bias", store.find("output/kernel")]))
    assert changed(store, trained) == ["hidden/bias", "output/kernel"]


def test_names_may_differ_and_two_may_begin_with_one(trained) -> None:
    renamed = {"first/kernel": "hidden/kernel", "second/kernel": "hidden/kernel"}
    store = store_of("first", "second")
    settings = Settings(trained.model_dir, var_name_to_prev_var_name=renamed)
    warm_start(store, settings)
    for name in renamed:
        np.testing.assert_array_equal(
            store.find(name).numpy(), trained.get_variable_value("hidden/kernel")
        )


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


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="warm_start_from=3 is of type int"):
        as_warm_start(3)


def test_vocabularies_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="var_name_to_vocab_info is set for"):
        Settings("model", var_name_to_vocab_info={"table": object()})


def test_a_folder_without_checkpoints_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="is neither an Estimator checkpoint nor a folder"):
        warm_start(store_of(), Settings(str(tmp_path)))


def test_an_expression_that_finds_nothing_is_refused(trained) -> None:
    with pytest.raises(ValueError, match="matches no variable"):
        warm_start(store_of(), Settings(trained.model_dir, "nothing"))


def test_a_name_that_is_not_used_is_refused(trained) -> None:
    settings = Settings(trained.model_dir, "hidden", var_name_to_prev_var_name={"other": "hidden"})
    with pytest.raises(ValueError, match=r"renames \['other'\], which are not warm-started"):
        warm_start(store_of(), settings)


def test_a_variable_that_was_not_saved_is_named(trained) -> None:
    with pytest.raises(ValueError, match="Not in the checkpoint: other/kernel"):
        warm_start(store_of("other"), Settings(trained.model_dir))
