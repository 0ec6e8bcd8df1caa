"""Variables are reused by creation order."""

from __future__ import annotations

import keras
import pytest

import stratagem as sg
from stratagem.estimator.steps.variable_store import VariableStore, current_store


@pytest.fixture
def store():
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        yield VariableStore(strategy)


def make(store, mode, *shapes, name="w", dtype="float32"):
    with store.call(mode):
        return [keras.Variable("zeros", shape=shape, dtype=dtype, name=name) for shape in shapes]


def test_later_calls_get_the_variables_of_the_first(store) -> None:
    first = make(store, "train", (2,), (3,))
    first[0].assign([1.0, 2.0])
    second = make(store, "train", (2,), (3,))
    assert [one is other for one, other in zip(first, second, strict=True)] == [True, True]
    assert second[0].numpy().tolist() == [1.0, 2.0]
    assert type(second[0]) is type(first[0])
    assert len(store.variables_of("train")) == 2


def test_layers_get_the_same_names_and_variables_in_each_call(store) -> None:
    kernels = []
    outside = keras.layers.Dense(1).name
    for _ in range(2):
        with store.call("train"):
            layers = [keras.layers.Dense(1), keras.layers.Dense(1)]
            for layer in layers:
                layer.build((None, 2))
        assert [layer.name for layer in layers] == ["dense", "dense_1"]
        kernels.append([layer.kernel for layer in layers])
    assert kernels[0][0] is kernels[1][0]
    assert kernels[0][1] is kernels[1][1]
    assert keras.layers.Dense(1).name != outside  # names outside go on
    assert sorted(store.named) == [
        "dense/bias",
        "dense/kernel",
        "dense_1/bias",
        "dense_1/kernel",
        "global_step",
    ]


def test_modes_share_what_has_one_path_and_not_metrics(store) -> None:
    def call(mode):
        with store.call(mode):
            layer = keras.layers.Dense(1)
            layer.build((None, 2))
            return layer, keras.metrics.Mean(name="mean")

    (trained, train_mean), (evaluated, eval_mean) = call("train"), call("eval")
    assert evaluated.kernel is trained.kernel
    assert eval_mean.total is not train_mean.total
    assert call("eval")[1].total is eval_mean.total
    assert not any("mean" in name for name in store.named)


def test_two_variables_of_one_path_are_distinguished(store) -> None:
    one, other = make(store, "train", (1,), (1,))
    assert one is not other
    assert {name: store.find(name) is v for name, v in {"w": one, "w#2": other}.items()} == {
        "w": True,
        "w#2": True,
    }
    assert [a is b for a, b in zip(make(store, "eval", (1,), (1,)), (one, other), strict=True)] == [
        True,
        True,
    ]


def test_a_layer_that_one_mode_freezes_is_trainable_in_another(store) -> None:
    def build(mode):
        with store.call(mode):
            layer = keras.layers.Dense(1)
            layer.build((None, 2))
        return layer

    build("eval").trainable = False
    assert store.find("dense/kernel").trainable is False
    assert build("train").kernel.trainable is True


def test_another_shape_is_refused(store) -> None:
    make(store, "train", (2,))
    with pytest.raises(ValueError, match=r"Variable 1 of the model function in mode 'train'"):
        make(store, "train", (3,))


def test_another_dtype_is_refused(store) -> None:
    make(store, "train", (2,))
    with pytest.raises(ValueError, match="in an earlier call it was 'w' with shape"):
        make(store, "train", (2,), dtype="float16")


def test_one_more_variable_is_refused(store) -> None:
    make(store, "train", (2,))
    with pytest.raises(ValueError, match="The model function created more than the"):
        make(store, "train", (2,), (2,))


def test_fewer_variables_are_refused(store) -> None:
    make(store, "train", (2,), (3,))
    with pytest.raises(ValueError, match=r"an earlier call: 'w' with shape \(3,\) is missing"):
        make(store, "train", (2,))


def test_one_path_with_two_shapes_in_two_modes_is_refused(store) -> None:
    make(store, "train", (2,))
    with pytest.raises(ValueError, match="and dtype float32 in mode 'eval', but"):
        make(store, "eval", (3,))


def test_store_is_current_only_in_a_call(store) -> None:
    assert current_store() is None
    with store.call("train"):
        assert current_store() is store
    assert current_store() is None
    assert store.is_complete("train")
    assert not store.is_complete("eval")
