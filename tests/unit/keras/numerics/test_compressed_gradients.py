"""Compressed gradients in training: which ones, their errors as state, files, and bad input."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.variables.store import is_compressed

DEVICES = ["cpu:0", "cpu:1"]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(128, 32)).astype("float32")
Y = RNG.integers(5, size=128)


def strategy_of(compression):
    ops = None if compression is None else sg.CompressedAllReduce(compression)
    return sg.MirroredStrategy(DEVICES, cross_device_ops=ops)


def made(compression, optimizer="sgd", **compile_arguments):
    keras.utils.set_random_seed(0)
    with strategy_of(compression).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((32,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.LayerNormalization(),
                keras.layers.Dense(5),
            ]
        )
        optimizer = keras.optimizers.get(optimizer)
        optimizer.learning_rate = 0.05
        model.compile(
            optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **compile_arguments,
        )
    return model


def fit(model, epochs=1):
    return model.fit(X, Y, batch_size=32, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def weights_of(model):
    return [np.asarray(one) for one in model.get_weights()]


def errors_of(model):
    return [one for one in model.optimizer.variables if one.path.endswith("kernel_error")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "compression", ["int8", "power_sgd", sg.compression.TopK(fraction=0.1)], ids=str
)
def test_training_gets_as_far_as_with_whole_gradients(compression) -> None:
    whole, compressed = made(None), made(compression)
    before, after = fit(whole, 12)[-1], fit(compressed, 12)[-1]
    assert after <= 1.25 * before
    pairs = zip(weights_of(whole), weights_of(compressed), strict=True)
    assert any(np.any(a != b) for a, b in pairs)


@pytest.mark.slow
def test_only_kernels_are_compressed() -> None:
    model = made("int8")
    fit(model)
    compression = model.weights[0].distribute_strategy.cross_device_ops.compression
    chosen = [one for one in model.trainable_variables if is_compressed(one, compression)]
    assert [one.shape for one in chosen] == [(32, 64)]
    assert len(errors_of(model)) == 1


def test_tables_that_are_sent_as_rows_have_no_errors() -> None:
    strategy = strategy_of("int8")
    with strategy.scope():
        table = keras.layers.Embedding(70_000, 2)
        table.build()
        optimizer = keras.optimizers.SGD()
        optimizer.build(table.trainable_variables)
    assert not is_compressed(table.embeddings, strategy.cross_device_ops.compression)
    assert all("error" not in one.path for one in optimizer.variables)


@pytest.mark.slow
def test_compiled_and_eager_steps_agree() -> None:
    compiled, eager = made("int8"), made("int8", run_eagerly=True)
    for model in (compiled, eager):
        fit(model)
    for a, b in zip(weights_of(compiled), weights_of(eager), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["float8", "power_sgd"])
def test_resumed_training_keeps_the_sum_of_errors(compression, tmp_path) -> None:
    model = made(compression, "adam")
    fit(model)
    model.save(tmp_path / "model.keras")
    with strategy_of(compression).scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(np.asarray(a.value), np.asarray(b.value), rtol=1e-6)
    assert np.abs(np.asarray(errors_of(loaded)[0].value)).max() > 0


@pytest.mark.slow
def test_checkpoint_has_the_errors(tmp_path) -> None:
    model = made("int8")
    fit(model)
    path = sg.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "step"))
    wanted = np.asarray(errors_of(model)[0].value)
    other = made("int8")
    other.optimizer.build(other.trainable_variables)
    sg.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
    np.testing.assert_allclose(np.asarray(errors_of(other)[0].value), wanted, rtol=1e-6)


@pytest.mark.slow
def test_file_of_whole_gradients_is_read(tmp_path) -> None:
    model = made(None, "adam")
    fit(model)
    model.save(tmp_path / "model.keras")
    with warnings.catch_warnings(), strategy_of("int8").scope():
        warnings.simplefilter("error")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    errors = errors_of(loaded)
    others = [one for one in loaded.optimizer.variables if all(one is not two for two in errors)]
    for a, b in zip(others, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(a.value), np.asarray(b.value))
    np.testing.assert_array_equal(np.asarray(errors[0].value), 0)


def test_one_replica_has_nothing_to_compress() -> None:
    keras.utils.set_random_seed(0)
    ops = sg.CompressedAllReduce("int8")
    with sg.MirroredStrategy(["cpu:0"], cross_device_ops=ops).scope():
        model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(64)])
        model.compile("sgd", "mse")
    model.fit(X, np.zeros((128, 64)), verbose=0)
    assert not errors_of(model)


def test_own_loop_is_compressed_too() -> None:
    strategy = strategy_of("int8")
    with strategy.scope():
        kernel = keras.Variable(np.zeros((64, 32), "float32"), name="kernel")
        optimizer = keras.optimizers.SGD(1.0)
    grads = [RNG.normal(size=(64, 32)).astype("float32") for _ in range(2)]
    values = sg.PerReplica(stacked=np.stack(grads))

    def step(grad):
        optimizer.apply([grad], [kernel])

    strategy.run(step, args=(values,))
    sent = -np.asarray(kernel.value)
    error = np.asarray(optimizer.variables[-1].value)
    assert np.any(sent != grads[0] + grads[1])
    np.testing.assert_allclose(sent + error, grads[0] + grads[1], atol=1e-5)


def test_loss_scale_is_refused() -> None:
    model = made("int8")
    with model.weights[0].distribute_strategy.scope():
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(ValueError, match="LossScaleOptimizer was applied with compression=Int8"):
        model.fit(X, np.zeros((128, 5)), verbose=0)


@pytest.mark.parametrize(
    "arguments",
    [{"shard_state": "optimizer"}, {"shard_state": "all"}],
    ids=str,
)
def test_sharded_state_is_refused(arguments) -> None:
    with pytest.raises(ValueError, match=r"compression=Int8.*variables are placed"):
        sg.MirroredStrategy(DEVICES, cross_device_ops=sg.CompressedAllReduce("int8"), **arguments)


def test_replicas_of_several_devices_are_refused() -> None:
    devices = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
    with pytest.raises(ValueError, match="over the devices of a replica"):
        sg.MirroredStrategy(devices, cross_device_ops=sg.CompressedAllReduce("int8"))
