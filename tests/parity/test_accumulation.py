"""Gradient accumulation and loss scaling of sharded variables: numbers and messages."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.tracing.arguments import flatten_arguments
from tests.parity.comparison import (
    KINDS,
    Current,
    Kind,
    Scope,
    assert_like_plain_keras,
    fitted,
    with_known_weights,
)

WIDTH = 32  # a kernel of this width is sharded
WIDE = 256  # the gradient of such a kernel is not packed with others
Optimizer = Callable[..., Any]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": functools.partial(keras.optimizers.SGD, 0.05, momentum=0.9),
    "adam": functools.partial(keras.optimizers.Adam, 0.01, epsilon=1e-3),
    "adamw": functools.partial(keras.optimizers.AdamW, 0.01, weight_decay=0.1, epsilon=1e-3),
    "clipnorm": functools.partial(keras.optimizers.SGD, 0.1, clipnorm=0.1),
    "global_clipnorm": functools.partial(keras.optimizers.SGD, 0.1, global_clipnorm=0.1),
    "average": functools.partial(
        keras.optimizers.SGD, 0.05, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3
    ),
}
_SHARDED = {"all", "optimizer"}
_KINDS = {
    **{name: KINDS[name] for name in ("central_4", "hybrid_4", "pinned_4")},
    **{
        state: Kind(functools.partial(sg.MirroredStrategy, shard_state=state), 4)
        for state in sorted(_SHARDED)
    },
}


@dataclasses.dataclass(frozen=True)
class Row:
    kind: str
    optimizer: str
    is_scaled: bool = False
    num_steps: int = 1  # per call

    @property
    def name(self) -> str:
        scaled = "-scaled" if self.is_scaled else ""
        return f"{self.kind}-{self.optimizer}{scaled}-{self.num_steps}"

    def make(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](gradient_accumulation_steps=2)
        if not self.is_scaled:
            return optimizer
        # The first step's loss is infinite; the scale doubles after two good steps.
        return keras.optimizers.LossScaleOptimizer(optimizer, 2.0**127, dynamic_growth_steps=2)


def made(scope: Scope, optimizer: Any, width: int = WIDTH, **arguments: Any) -> keras.Model:
    with scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width, "tanh")])
        model.add(keras.layers.Dense(width, "tanh"))
        model.add(keras.layers.Dense(1))
        with_known_weights(model)
        model.compile(optimizer, "mse", **arguments)
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    x = generator.normal(size=(48, 4)).astype("float32")
    return x, (10.0 + x.sum(axis=1, keepdims=True)).astype("float32")


ROWS = [
    *(Row(kind, name) for kind in _KINDS for name in OPTIMIZERS),
    *(Row(kind, "adam", num_steps=3) for kind in sorted(_SHARDED)),
    *(Row(kind, name, is_scaled=True) for kind in _KINDS for name in ("adam", "global_clipnorm")),
]
_QUICK = "all-global_clipnorm-scaled-1"


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_numbers_are_those_of_plain_keras(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Current, "kind", _KINDS[row.kind])

    def job(scope: Scope) -> Any:
        model = made(scope, row.make(), steps_per_execution=row.num_steps)
        return fitted(model, *data(), batch_size=8, epochs=1)

    # Keras multiplies weights by an integer for their average, which strict types refuse.
    with jax.numpy_dtype_promotion("standard"):
        assert_like_plain_keras(job, tolerance=2e-6)


def messages(row: Row) -> Counter[tuple[str, bool]]:
    """Counts the arrays that devices exchange in a step, by kind, and by being large."""
    strategy = _KINDS[row.kind].make(["cpu:0", "cpu:1"])
    model = made(strategy.scope, row.make(), WIDE)
    variables, optimizer = model.trainable_variables, model.optimizer
    with strategy.scope():
        optimizer.build(variables)
    x = strategy.distribute_values_from_function(lambda _: np.ones((2, 4), "float32"))

    def step(x: Any) -> None:
        def loss() -> Any:
            return optimizer.scale_loss(keras.ops.sum(model(x) ** 2))

        _, grads = sg.value_and_grad(loss, variables)
        optimizer.apply(grads, variables)

    strategy.run(step, args=(x,))
    (program,) = strategy.executor.programs
    text = str(program.lower(flatten_arguments((x,), {}, num_replicas=2)).compile().as_text())
    assert " conditional(" not in text
    found: Counter[tuple[str, bool]] = Counter()
    for shapes, kind in re.findall(r"= (.*?) (all-\w+|reduce-scatter)(?:-start)?\(", text):
        for dimensions in re.findall(r"\w+\[([\d,]*)\]", shapes):
            size = np.prod([int(one) for one in dimensions.split(",") if one])
            found[kind, bool(size >= WIDE * WIDE // 2)] += 1
    return found


_MESSAGE_ROWS = [
    Row("all", name, is_scaled)
    for name in ("adam", "global_clipnorm")
    for is_scaled in (False, True)
]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if row.name == _QUICK else pytest.mark.slow)
        for row in _MESSAGE_ROWS
    ],
)
def test_gradients_are_accumulated_in_shards(row: Row) -> None:
    found = messages(row)
    # Of the kernel that is large enough. The rest is as large as a bias, or a norm.
    assert {key: found[key] for key in found if key[1]} == {
        ("all-gather", True): 1,
        ("reduce-scatter", True): 1,
    }
