"""Arguments: renamed, dropped, added, refused."""

from __future__ import annotations

import libcst as cst
import pytest

from stratagem.cli.migrate.names import ArgumentsRefusedError, as_indices
from tests.unit.cli.migrate.programs import body

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
    (
        "tf.Variable(1., False, name='v', shape=())",
        "sg.Variable(1., False, name='v')",
    ),
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


def test_lines_of_a_call_stay() -> None:
    text = "y = tf.reduce_sum(\n    x,  # rows\n    axis=0,\n    name='n',\n)\n"
    assert body(text) == "y = keras.ops.sum(\n    x,  # rows\n    axis=0,\n)\n"


@pytest.mark.parametrize("call", ["tf.split(x, sizes())", "tf.split(x, [a, b])", "tf.nn.l2_loss()"])
def test_refused_call_stays(call) -> None:
    mark, line = body(f"y = {call}\n").splitlines()
    assert mark.startswith(f"# STRATAGEM: {call.partition('(')[0]}: ")
    assert line == f"y = {call}"


def test_sizes_that_are_not_written_out() -> None:
    with pytest.raises(ArgumentsRefusedError, match="sizes like these"):
        as_indices(cst.parse_expression("sizes()"))


def test_comments_of_a_dropped_argument_do_not_break_the_call() -> None:
    text = "y = tf.zeros([2], name='z',  # zeros\n    dtype=tf.int32)\n"
    assert body(text) == 'y = keras.ops.zeros([2], dtype="int32")\n'
