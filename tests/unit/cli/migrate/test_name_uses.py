"""Decorators, calls and assignments; counterparts that other libraries have."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.cli.migrate.programs import SG, body, rewritten, same

# `tf.function`: compiled functions, and those that read a dataset themselves.

PLAIN = [
    "def f(iterator):\n    return strategy.run(g, args=(next(iterator),))\n",
    "def f(it):\n    return it.get_next()\n",
    "def f(dataset):\n    for x in dataset:\n        g(x)\n",
    "def f():\n    return strategy.distribute_datasets_from_function(g)\n",
    "def f(x):\n    return x\nstrategy.run(f, args=(x,))\n",
    "def f(x):\n    return x\ncoordinator.schedule(f, args=(x,))\n",
]


@pytest.mark.parametrize("code", PLAIN)
def test_decorator_is_dropped(code) -> None:
    same(f"# A step.\n@tf.function\n{code}", f"# A step.\n{code}")


def test_decorator_of_a_method_that_replicas_run_is_dropped() -> None:
    step = "    def step(self, x):\n        return x\n"
    train = "    def train(self, x):\n        return self.strategy.run(self.step, args=(x,))\n"
    same(f"class A:\n    @tf.function(jit_compile=True)\n{step}{train}", f"class A:\n{step}{train}")


def test_other_functions_are_compiled() -> None:
    f = "def f(x):\n    return strategy.run(g, args=(x,))\n@other\n"
    h = "def h(x):\n    return x\nfor i in {}(3):\n    f(i)\n"
    same(
        f"@tf.function(input_signature=[a], jit_compile=True)\n{f}@tf.function\n"
        + h.format("tf.range"),
        f"@sg.function(jit_compile=True)\n{f}@sg.function\n" + h.format("range"),
    )


# Arguments: renamed, dropped, added, refused.

CALLS = [
    ("tf.cast(x, tf.float32)", 'keras.ops.cast(x, "float32")'),
    ("tf.reduce_mean(x, 1, True)", "keras.ops.mean(x, 1, True)"),
    ("tf.reduce_sum(input_tensor=x, axis=0, name='n')", "keras.ops.sum(x=x, axis=0)"),
    ("tf.math.reduce_max(x, keepdims=True)", "keras.ops.max(x, keepdims=True)"),
    ("tf.argmax(x)", "keras.ops.argmax(x, axis=0)"),
    ("tf.argmax(x, 1)", "keras.ops.argmax(x, 1)"),
    ("tf.gather(p, i)", "keras.ops.take(p, i, axis=0)"),
    ("tf.concat([a, b], 1)", "keras.ops.concatenate([a, b], 1)"),
    ("tf.range(2, limit=5)", "keras.ops.arange(2, stop=5)"),
    ("tf.eye(3, dtype=tf.int32)", 'keras.ops.eye(3, dtype="int32")'),
    ("tf.add_n(losses)", "sum(losses)"),
    ("tf.nn.l2_loss(w)", "keras.ops.sum(keras.ops.square(w)) / 2"),
    ("tf.split(x, 2)", "keras.ops.split(x, 2, axis=0)"),
    ("tf.split(x, [4, 2, 1], axis=1)", "keras.ops.split(x, [4, 6], axis=1)"),
    (
        "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=z)",
        "keras.ops.sparse_categorical_crossentropy(target=y, output=z, from_logits=True)",
    ),
    ("tf.Variable(1., False, name='v', shape=())", "sg.Variable(1., False, name='v')"),
    ("tf.Variable(1., True, None, None, 'v')", "sg.Variable(1., True, name='v')"),
    ("tf.function(f, jit_compile=True)", "sg.function(f, jit_compile=True)"),
    ("tf.random.set_seed(seed=1)", "keras.utils.set_random_seed(seed=1)"),
    ("tf.matmul(a, b, transpose_a=False)", "keras.ops.matmul(a, b)"),
    ("tf.stack(*values)", "keras.ops.stack(*values)"),
    ("tf.keras.layers.LeakyReLU(alpha=0.1)", "keras.layers.LeakyReLU(negative_slope=0.1)"),
    ("tf.keras.models.load_model(p, options=o)", "keras.models.load_model(p)"),
]


@pytest.mark.parametrize(("before", "after"), CALLS)
def test_call(before, after) -> None:
    assert body(f"y = {before}\n") == f"y = {after}\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "y = tf.reduce_sum(\n    x,  # rows\n    axis=0,\n    name='n',\n)\n",
            "y = keras.ops.sum(\n    x,  # rows\n    axis=0,\n)\n",
        ),
        (
            "y = tf.zeros([2], name='z',  # zeros\n    dtype=tf.int32)\n",
            'y = keras.ops.zeros([2], dtype="int32")\n',
        ),
    ],
    ids=["lines stay", "comment of a dropped argument"],
)
def test_call_of_several_lines(before, after) -> None:
    assert body(before) == after


@pytest.mark.parametrize("call", ["tf.split(x, sizes())", "tf.split(x, [a, b])", "tf.nn.l2_loss()"])
def test_refused_call_stays(call) -> None:
    mark, line = body(f"y = {call}\n").splitlines()
    assert mark.startswith(f"# STRATAGEM: {call.partition('(')[0]}: ")
    assert line == f"y = {call}"


# Counterparts of other libraries that belong to JAX or Keras, used as the migration table says.


def test_print_of_a_step_shows_values(capfd: pytest.CaptureFixture[str]) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(value: jax.Array) -> None:
        jax.debug.print("value {}", 2 * value)

    strategy.run(step, args=(jnp.asarray(3),))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["value 6"] * 2


def test_operations_of_keras_replace_its_backend() -> None:
    rows = np.arange(6.0, dtype="float32").reshape(2, 3)
    np.testing.assert_allclose(keras.ops.mean(rows, axis=1), rows.mean(axis=1))
    np.testing.assert_allclose(keras.ops.square(rows), rows**2)
    assert not hasattr(keras.backend, "mean")


def test_program_without_a_cluster_is_process_0_of_1() -> None:
    assert (jax.process_index(), jax.process_count()) == (0, 1)


def test_profile_of_a_block_is_written(tmp_path: Path) -> None:
    with jax.profiler.trace(tmp_path):
        jnp.ones(3).block_until_ready()
    assert [path for path in tmp_path.rglob("*") if path.is_file()]


# Assignments of modules.


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("k = tf.keras", "import keras as k"),
        ("layers = tf.keras.layers", "from keras import layers"),
        ("L = tf.keras.layers", "from keras import layers as L"),
    ],
)
def test_module_at_the_top(before, after) -> None:
    text = rewritten(f"import tensorflow as tf\n{before}\nx = 1\n")
    assert text.splitlines()[0] == SG.rstrip()
    assert after in text.splitlines()
    assert "tensorflow" not in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Dense = tf.keras.layers.Dense\n", "Dense = keras.layers.Dense\n"),
        ("a = b = tf.keras\n", "a = b = keras\n"),
        ("a.b = tf.keras.layers\n", "a.b = keras.layers\n"),
        ("def f():\n    l = tf.keras.layers\n", "def f():\n    l = keras.layers\n"),
    ],
)
def test_other_assignments(before, after) -> None:
    assert body(before) == after
