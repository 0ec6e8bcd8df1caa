"""Compressed gradients in training: which ones, their errors as state, files, and bad input."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import stratagem as sg
from stratagem.variables.layouts import is_compressed
from tests.marks import slow
from tests.parity.comparison import mirrored

DEVICES = ["cpu:0", "cpu:1"]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(128, 32)).astype("float32")
Y = RNG.integers(5, size=128)


def strategy_of(compression):
    ops = None if compression is None else sg.CompressedAllReduce(compression)
    return sg.MirroredStrategy(DEVICES, cross_device_ops=ops)


def made(compression, optimizer="sgd", **compiled):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    with strategy_of(compression).scope():
        model = keras.Sequential([layers.Input((32,)), layers.Dense(64, activation="relu")])
        model.add(layers.LayerNormalization())
        model.add(layers.Dense(5))
        optimizer = keras.optimizers.get(optimizer)
        optimizer.learning_rate = 0.05
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, **compiled)
    return model


def fit(model, epochs=1):
    return model.fit(X, Y, batch_size=32, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def weights_of(model):
    return [np.asarray(one) for one in model.get_weights()]


def errors_of(model):
    return [one for one in model.optimizer.variables if one.path.endswith("kernel_error")]


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["int8", "power_sgd"])
def test_training_gets_as_far_as_with_whole_gradients(compression) -> None:
    whole, compressed = made(None), made(compression)
    before, after = fit(whole, 12)[-1], fit(compressed, 12)[-1]
    assert after <= 1.25 * before
    pairs = zip(weights_of(whole), weights_of(compressed), strict=True)
    assert any(np.any(a != b) for a, b in pairs)


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
    compression_ = model.weights[0].distribute_strategy.cross_device_ops.compression
    chosen = [one for one in model.trainable_variables if is_compressed(one, compression_)]
    assert [one.shape for one in chosen] == [(32, 64)]  # kernels alone
    assert len(errors_of(model)) == 1
    path = sg.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "step"))
    other = made(compression, "adam")
    other.optimizer.build(other.trainable_variables)
    sg.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
    model.save(tmp_path / "model.keras")
    with strategy_of(compression).scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    for one in (loaded, other):
        for a, b in zip(one.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_allclose(np.asarray(a.value), np.asarray(b.value), rtol=1e-6)
    assert np.abs(np.asarray(errors_of(loaded)[0].value)).max() > 0


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


@pytest.mark.parametrize("compression", ["bfloat16", "int8", "power_sgd"])
def test_gradients_of_several_batches_add_up_to_one_update(compression) -> None:
    """Each batch rounds its gradients in its own way; their errors are in the next ones."""
    accumulating = [keras.optimizers.SGD(gradient_accumulation_steps=2) for _ in range(2)]
    whole, model = made(None, accumulating[0]), made(compression, accumulating[1])
    before = weights_of(model)
    fit(whole)
    fit(model)
    assert int(model.optimizer.iterations) == 2
    moved = [np.abs(a - b).max() for a, b in zip(weights_of(whole), before, strict=True)]
    apart = [np.abs(a - b).max() for a, b in zip(weights_of(whole), weights_of(model), strict=True)]
    assert 0 < max(apart) < 0.5 * max(moved)


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


def test_what_cannot_be_compressed_is_refused() -> None:
    ops = sg.CompressedAllReduce("int8")
    for shard_state in ("optimizer", "all"):
        with pytest.raises(ValueError, match=r"compression=Int8.*variables are placed"):
            sg.MirroredStrategy(DEVICES, cross_device_ops=ops, shard_state=shard_state)
    with pytest.raises(ValueError, match="over the devices of a replica"):
        sg.MirroredStrategy([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]], cross_device_ops=ops)
    model = made("int8")
    with model.weights[0].distribute_strategy.scope():
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(ValueError, match="LossScaleOptimizer was applied with compression=Int8"):
        model.fit(X, np.zeros((128, 5)), verbose=0)


# What a step of one's own computes that is not that of one device is said, with its line.

_FILE = Path(__file__).name


def _warned(loss: Callable[[Any, Any], Any], num_rows: int, num_replicas: int) -> list[str]:
    """The warnings of two epochs with a loss in a `train_step` of one's own."""
    x = np.linspace(0.0, 1.0, 3 * num_rows, dtype="float32").reshape(num_rows, 3)

    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            value, gradients = sg.value_and_grad(
                lambda: loss(y, self(x, training=True)), self.trainable_variables
            )
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": value}

    with mirrored(num_replicas).scope():
        inputs = keras.Input((3,))
        model = Own(inputs, keras.layers.Dense(2, kernel_regularizer="l2")(inputs))
        model.compile(keras.optimizers.SGD(0.05))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(x, x[:, :2], batch_size=num_rows, epochs=2, verbose=0)
    return [str(one.message) for one in caught if "SG409" in str(one.message)]


def _mean(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p))  # this line


def _ratio(y: Any, p: Any) -> Any:
    kept = ops.cast(y > 0.5, "float32")
    return ops.sum(kept * ops.square(y - p)) / ops.sum(kept)  # this line


def _root(y: Any, p: Any) -> Any:
    return ops.sqrt(ops.mean(ops.square(y - p)))  # this line


def _pairs(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(ops.matmul(p, ops.transpose(y))))  # this line


def _masked_by_hand(y: Any, p: Any) -> Any:
    context = sg.get_replica_context()
    mask = ops.cast(context.example_mask, "float32")
    return ops.sum(mask * ops.mean(ops.square(y - p), -1)) / ops.maximum(ops.sum(mask), 1.0)


def _of_all(y: Any, p: Any) -> Any:
    context = sg.get_replica_context()
    kept = ops.cast(y > 0.5, "float32")
    return ops.sum(kept * ops.square(y - p)) / context.all_reduce("sum", ops.sum(kept))


def _summed_mean(y: Any, p: Any) -> Any:
    own = sg.compute_average_loss(ops.mean(ops.square(y - p), -1))
    return sg.get_replica_context().all_reduce("sum", own)  # this line


def _line(function: Callable[..., Any]) -> str:
    lines = Path(__file__).read_text().splitlines()
    start = function.__code__.co_firstlineno
    found = next(n for n, line in enumerate(lines[start:], start + 1) if "# this line" in line)
    return f"{_FILE}:{found}"


def _penalized_sum(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p)) / 8 + 0.5


_ONE_REPLICA = "computes a number from the rows of one replica at {}"
_WARNED: list[Any] = [
    (_ratio, 4, 2, [_ONE_REPLICA]),
    slow(_root, 4, 2, [_ONE_REPLICA]),
    (_pairs, 4, 2, [_ONE_REPLICA]),
    (_mean, 5, 3, ["combines the rows of a replica at {}, and a batch has", "(2, 2, 1) rows"]),
    (_penalized_sum, 4, 2, ["A loss in Own.train_step adds a sum over rows to a number that does"]),
    (
        _summed_mean,
        4,
        2,
        ["a mean over rows over the replicas at {}", "add up to 2 times the mean"],
    ),
]


@pytest.mark.parametrize(("loss", "num_rows", "num_replicas", "words"), _WARNED)
def test_number_that_is_not_that_of_one_device_is_named_once(
    loss: Callable[..., Any], num_rows: int, num_replicas: int, words: list[str]
) -> None:
    (text,) = _warned(loss, num_rows, num_replicas)
    for one in words:
        assert one.format(_line(loss) if "{}" in one else "") in text


@pytest.mark.parametrize(
    ("loss", "num_rows", "num_replicas"),
    [slow(_mean, 6, 3), (_masked_by_hand, 5, 3), slow(_of_all, 4, 2), slow(_ratio, 4, 1)],
)
def test_numbers_of_one_device_are_not_warned_of(loss, num_rows, num_replicas) -> None:
    assert _warned(loss, num_rows, num_replicas) == []


class _AddsSum(keras.layers.Dense):
    def call(self, inputs: Any) -> Any:
        outputs = super().call(inputs)
        self.add_loss(ops.sum(ops.square(outputs)))  # this line
        return outputs


@pytest.mark.parametrize("loss", ["mse", None])
def test_sum_that_a_layer_adds_is_named(loss: str | None) -> None:
    x = np.random.default_rng(0).standard_normal((4, 3)).astype("float32")
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), _AddsSum(2), keras.layers.Dense(2)])
        model.compile("sgd", loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(x, x[:, :2], batch_size=4, verbose=0)
    (text,) = (str(one.message) for one in caught if "SG409" in str(one.message))
    assert text.startswith("A loss in Sequential.train_step adds a sum over rows to a number that")


class _Weighed(keras.Model):
    """A sum over rows with weights, and a mean without."""

    def train_step(self, data: Any) -> Any:
        x, y, *weights = data

        def loss() -> Any:
            values = ops.mean(ops.square(self(x, training=True) - y), -1)
            return ops.sum(values * weights[0]) if weights else ops.mean(values)

        value, gradients = sg.value_and_grad(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": value}


def test_step_may_sum_with_weights_and_average_without() -> None:
    x = np.linspace(0.0, 1.0, 12, dtype="float32").reshape(4, 3)
    options: Any = {"batch_size": 4, "verbose": 0}
    found: list[list[float]] = []
    for num_replicas in (1, 2):
        with mirrored(num_replicas).scope():
            inputs = keras.Input((3,))
            model = _Weighed(inputs, keras.layers.Dense(2, kernel_initializer="ones")(inputs))
            model.compile(keras.optimizers.SGD(0.05))
        losses = model.fit(x, x[:, :2], **options).history["own"]
        losses += model.fit(x, x[:, :2], sample_weight=x[:, 0], **options).history["own"]
        found.append([*losses, *np.ravel(model.get_weights()[0])])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
