"""Training wherever variables are kept: the numbers of copies, and of one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import stratagem as sg
from stratagem.keras.training.model import lower_training_step
from tests.unit.strategies.decoders import (
    compiled_decoder,
    decoder_strategy,
    fit_decoder,
    largest_difference,
)

TWO, FOUR = ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
PAIRS = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
HOST, PINNED, STATE = "cpu:4", "pinned_host", sg.placement.optimizer_state
NUM_USERS, NUM_ITEMS = 9000, 8192  # large enough for rows to travel
RNG = np.random.default_rng(0)
USERS = RNG.integers(0, NUM_USERS, (22, 3), dtype="int32")
USERS[::3, 0] = 7
ITEMS = RNG.integers(0, NUM_ITEMS, (22,), dtype="int32")
WEIGHTS = RNG.uniform(0.2, 2.0, size=22).astype("float32")
Y = RNG.normal(size=(22, 4)).astype("float32")


def hybrid(devices: Any, placement: Any) -> sg.HybridStrategy:
    return sg.HybridStrategy(devices, placement=placement, parameter_device=HOST)


def sharing(devices: Any, shard_state: str, **options: Any) -> sg.MirroredStrategy:
    return sg.MirroredStrategy(devices, shard_state=shard_state, **options)


def layouts_of_keras() -> Any:
    """What a user of Keras's own ModelParallel has; the axis is as long as a group."""
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], PAIRS[0])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["users/embeddings"] = (None, "model")
    layouts["wide/kernel"] = (None, "model")
    layouts["wide/bias"] = ("model",)
    return layouts


RULES = {
    "users/embeddings": "central",
    sg.placement.in_layer("items"): "sharded",
    sg.placement.at_least_bytes(2**14): "sharded",
}
PINNED_KERNEL, SHARDED, CENTRAL = {"kernel": PINNED}, {"items": "sharded"}, {"items": "central"}
RULES_OF_GROUPS = {"embeddings": "sharded", "wide": "central"}
OWN = {"users/embeddings": (None, "logical"), "wide/kernel": (None, "logical")}
# Each strategy, and the optimizers and steps of a call that it is tried with.
CASES: dict[str, tuple[Callable[[], sg.Strategy], str]] = {
    "central": (lambda: sg.CentralStorageStrategy(TWO, HOST), "Adam 3"),
    "central, groups": (lambda: sg.CentralStorageStrategy(PAIRS, HOST), "Adagrad 2, Adam 1"),
    "pinned": (lambda: sg.CentralStorageStrategy(TWO, PINNED), "Adam 3"),
    "pinned, 1": (lambda: hybrid(["cpu:0"], {"": PINNED}), "Adagrad 3"),
    "pinned, 4": (lambda: hybrid(FOUR, {"": PINNED}), "Adagrad 1"),
    "pinned kernel, sharded": (lambda: hybrid(TWO, PINNED_KERNEL | SHARDED), "Adafactor 3"),
    "pinned kernel, central": (lambda: hybrid(TWO, PINNED_KERNEL | CENTRAL), "Adam 3"),
    "central kernel": (lambda: hybrid(TWO, {"items": PINNED, "wide": "central"}), "Adagrad 1"),
    "rules": (lambda: hybrid(TWO, RULES), "Adam 3"),
    "rules, 1": (lambda: hybrid(["cpu:0"], RULES), "Adagrad 1"),
    "rules, 4": (lambda: hybrid(FOUR, RULES), "Adagrad 1"),
    "rules, groups": (lambda: hybrid(PAIRS, RULES_OF_GROUPS), "Adagrad 2, Adam 1"),
    "all": (lambda: sharing(TWO, "all"), "Adam 3, SGD 1, Lamb 1, Muon 1"),
    "all, 4": (lambda: sharing(FOUR, "all"), "Adam 1"),
    "all, groups": (lambda: sharing(PAIRS, "all"), "Adagrad 2, Adam 1"),
    "all, copies": (lambda: sharing(FOUR, "all", shard_size=2), "Adam 1"),
    "optimizer": (lambda: sharing(TWO, "optimizer"), "Adagrad 1"),
    "optimizer, 4": (lambda: sharing(FOUR, "optimizer"), "Adam 1"),
    "optimizer, groups": (lambda: sharing(PAIRS, "optimizer"), "Adagrad 2"),
    "groups": (lambda: sg.MirroredStrategy(PAIRS), "Adam 3"),
    "layouts": (lambda: sg.MirroredStrategy(PAIRS, layout_map=OWN), "Adam 1, Adam 3"),
    "layouts of Keras": (
        lambda: sg.MirroredStrategy(PAIRS, layout_map=layouts_of_keras()),
        "Adam 1",
    ),
    "pinned state": (lambda: hybrid(TWO, {STATE: PINNED}), "Adam 1"),
    "pinned state, sharded": (lambda: hybrid(TWO, {STATE: PINNED, "": "sharded"}), "Adam 3"),
    "sharded state, pinned": (lambda: hybrid(TWO, {STATE: "sharded", "wide": PINNED}), "Adam 1"),
    "copied state": (lambda: hybrid(TWO, {STATE: "mirrored", "": "sharded"}), "Adagrad 3"),
}
QUICK = {("central", "Adam 3"), ("pinned state", "Adam 1")}
QUICK |= {("layouts", "Adam 1"), ("all, copies", "Adam 1")}


def made(strategy: sg.Strategy, optimizer: str, steps: int = 1) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        users, item = keras.Input((3,), dtype="int32"), keras.Input((), dtype="int32")
        parts = [
            keras.layers.Flatten()(keras.layers.Embedding(NUM_USERS, 8, name="users")(users)),
            keras.layers.Embedding(NUM_ITEMS, 8, name="items")(item),
        ]
        hidden = keras.layers.Concatenate()(parts)
        # Behind the wide layer it would leave its bias gradients of rounding errors alone.
        hidden = keras.layers.BatchNormalization(name="norm")(hidden)
        hidden = keras.layers.Dense(128, "tanh", kernel_constraint="max_norm", name="wide")(hidden)
        hidden = keras.layers.Dropout(0.1)(hidden)
        top = keras.layers.Dense(4, kernel_regularizer="l2", name="top")(hidden)
        model = keras.Model([users, item], top)
        rule = getattr(keras.optimizers, optimizer)(0.01, global_clipnorm=1.0)
        model.compile(rule, "mse", metrics=["mae"], steps_per_execution=steps)
    return model


def fitted(model: keras.Model) -> dict[str, Any]:
    """Trains, with a short last batch; returns the history and all values after it."""
    fit: Any = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
    history = model.fit([USERS, ITEMS], Y, sample_weight=WEIGHTS, **fit).history
    variables = [*model.weights, *model.optimizer.variables]
    values = {f"variable {index}": one.numpy() for index, one in enumerate(variables)}
    return history | values


def measured(model: keras.Model) -> dict[str, Any]:
    found, x = fitted(model), [USERS, ITEMS]
    found["evaluate"] = model.evaluate(x, Y, verbose=0)
    found["predict"] = model.predict(x, verbose=0)
    found["called"] = np.asarray(model(x))  # outside of steps
    return found


@functools.cache
def of_copies(num_replicas: int, optimizer: str) -> dict[str, Any]:
    """Of as many replicas: each draws numbers of its own for dropout."""
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    return measured(made(strategy, optimizer))


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def _cases() -> list[Any]:
    cases = [(name, one) for name, (_, several) in CASES.items() for one in several.split(", ")]
    return [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow, id="-".join(one))
        for one in cases
    ]


@pytest.mark.parametrize(("name", "case"), _cases())
def test_training_gives_the_numbers_of_copies(name: str, case: str) -> None:
    strategy, (optimizer, steps) = CASES[name][0](), case.split()
    got = measured(made(strategy, optimizer, int(steps)))
    assert_same(got, of_copies(strategy.num_replicas_in_sync, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pinned", "all"),
        ("all", "rules"),
        ("rules", "layouts"),
        ("layouts", "central"),
        ("central", "pinned state"),
        ("groups", "pinned"),
    ],
)
def test_state_goes_on_under_another_strategy(before, after, tmp_path) -> None:
    first, second = (made(CASES[name][0](), "Adam") for name in (before, after))
    fitted(first)
    second.optimizer.build(second.trainable_variables)
    sg.train.Checkpoint(model=first).write(tmp_path / "kept")
    sg.train.Checkpoint(model=second).read(tmp_path / "kept")
    assert largest_difference(second, first) == 0
    first.save(tmp_path / "model.keras")
    first.save_weights(tmp_path / "model.weights.h5")
    second.set_weights([np.zeros(one.shape) for one in first.weights])
    second.load_weights(tmp_path / "model.weights.h5")
    loaded: Any = keras.saving.load_model(tmp_path / "model.keras")
    for one, other, third in zip(first.weights, second.get_weights(), loaded.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other)
        np.testing.assert_array_equal(one.numpy(), third.numpy())
    assert_same(fitted(second), fitted(first))


# A decoder, whose weights are divided by layouts, over replicas, or both.


@functools.cache
def alone(optimizer: str) -> tuple[keras.Model, list[float]]:
    model = compiled_decoder(contextlib.nullcontext(), OPTIMIZERS[optimizer](), 1)
    return model, fit_decoder(model)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    # The usual epsilon makes numbers of rounding errors where gradients are almost zero.
    "Adam": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-4, global_clipnorm=1.0),
}


def keras_map() -> Any:
    """Weights by both axes, as in KerasHub's maps; the mesh says what a replica is."""
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], [f"cpu:{i}" for i in range(8)])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["words/embeddings"] = ("model", "batch")
    layouts[".*/(query|key|value)/kernel"] = ("model", "batch", None)
    layouts[".*/attention_output/kernel"] = ("model", None, "batch")
    layouts["up_[0-9]/kernel"] = ("batch", "model")
    layouts["down_[0-9]/kernel"] = ("model", "batch")
    return layouts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "make", "steps"),
    [
        ("momentum", lambda: decoder_strategy(2, 2, "all"), 1),
        ("momentum", lambda: decoder_strategy(2, 4), 1),
        ("Adam", lambda: decoder_strategy(1, 4), 1),
        ("Adam", lambda: decoder_strategy(2, 4, "optimizer"), 2),
        ("Adam", lambda: decoder_strategy(4, 2, "all"), 1),
        ("Adam", lambda: decoder_strategy(8, 1, "all", 2), 1),
        ("Adam", lambda: decoder_strategy(8, 1, "optimizer", 4), 1),
        ("Adam", lambda: decoder_strategy(4, 2, "all", 2), 2),
        ("Adam", lambda: sg.MirroredStrategy(layout_map=keras_map()), 1),
    ],
    ids=range(9),
)
@pytest.mark.filterwarnings("ignore:Variable 'attention_0/key/kernel':UserWarning")
def test_decoder_is_trained_as_on_one_device(optimizer, make, steps) -> None:
    model = compiled_decoder(make().scope(), OPTIMIZERS[optimizer](), 1, steps_per_execution=steps)
    losses = fit_decoder(model)
    reference, expected = alone(optimizer)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert largest_difference(model, reference) < 1e-5


# Experts divided over the devices of a replica: the numbers of one device, nothing gathered.

WIDTH, INNER, NUM_EXPERTS = 8, 24, 4
OF_EXPERTS = {".*/experts_(in|out)": ("logical", None, None)}
TOKENS, TARGETS = np.random.default_rng(11).normal(size=(2, 8, 6, WIDTH)).astype("float32")


class Experts(keras.layers.Layer):
    """Two experts of four for each token, with a loss that balances them over the global batch."""

    def build(self, input_shape: Any) -> None:
        self.router = self.add_weight((WIDTH, NUM_EXPERTS), name="router")
        self.inner = self.add_weight((NUM_EXPERTS, WIDTH, INNER), name="experts_in")
        self.outer = self.add_weight((NUM_EXPERTS, INNER, WIDTH), name="experts_out")

    def call(self, x: Any) -> Any:
        shares = ops.softmax(ops.matmul(x, self.router))
        best, numbers = ops.top_k(shares, 2)
        chosen = ops.one_hot(numbers, NUM_EXPERTS)
        gates = ops.sum(chosen * best[..., None], axis=-2)
        frequencies = ops.mean(chosen, axis=(0, 1, 2))
        context = sg.get_replica_context()
        if context is not None:
            frequencies = context.all_reduce("mean", frequencies)
        self.add_loss(NUM_EXPERTS * ops.sum(frequencies * ops.mean(shares, axis=(0, 1))))
        hidden = ops.silu(ops.einsum("btd,edf->ebtf", x, self.inner))
        return ops.einsum("ebtf,efd,bte->btd", hidden, self.outer, gates)


def experts(scope: contextlib.AbstractContextManager[Any]) -> keras.Model:
    keras.utils.set_random_seed(3)
    with scope:
        model = keras.Sequential([keras.Input((6, WIDTH)), Experts(name="block")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def expert_strategy(replicas: int, parts: int, **options: Any) -> sg.MirroredStrategy:
    names = [f"cpu:{index}" for index in range(replicas * parts)]
    return sg.MirroredStrategy(names, devices_per_replica=parts, layout_map=OF_EXPERTS, **options)


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        (2, {}),
        pytest.param(4, {"shard_state": "all"}, marks=pytest.mark.slow),
        pytest.param(2, {"sequence_axis": 1}, marks=pytest.mark.slow),
    ],
)
def test_experts_are_those_of_one_device(parts, options) -> None:
    models = (
        experts(contextlib.nullcontext()),
        experts(expert_strategy(2, parts, **options).scope()),
    )
    fit: Any = {"batch_size": 4, "verbose": 0, "shuffle": False}
    expected, losses = (one.fit(TOKENS, TARGETS, **fit).history["loss"] for one in models)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for wanted, value in zip(*(one.get_weights() for one in models), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def test_experts_are_not_gathered() -> None:
    """Each device computes its experts, and replicas sum the gradients of one device's."""
    model = experts(expert_strategy(2, 2).scope())
    text = lower_training_step(model, (TOKENS[:4], TARGETS[:4])).compile().as_text()
    assert f"f32[{NUM_EXPERTS},{WIDTH},{INNER}]" not in text
    assert f"f32[{NUM_EXPERTS // 2},{WIDTH},{INNER}]" in text
