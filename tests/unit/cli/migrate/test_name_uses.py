"""Names that code reads and assigns."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import libcst as cst
import numpy as np
import pytest
from libcst.metadata import MetadataWrapper

import stratagem as sg
from stratagem.cli.migrate import tapes as name_uses
from stratagem.cli.migrate.context import FileContext, dotted, module_names, with_marks
from stratagem.cli.migrate.names import code_of, print_call
from stratagem.cli.migrate.rules import Advice
from stratagem.cli.migrate.tapes import UnusualTapeError, find_gradients, split_losses
from tests.unit.cli.migrate.programs import SG, body, rewritten, same

CODE = [
    ("x = y", ["x"], {"y"}, []),
    ("x += y", ["x"], {"x", "y"}, ["x"]),
    ("x = x + 1", ["x"], {"x"}, ["x"]),
    ("x = 1\nz = x", ["x", "z"], {"x"}, []),
    ("for i in a:\n    b = i", ["i", "b"], {"a", "i"}, []),
    ("a.b = c", [], {"a", "c"}, []),
    ("f = lambda u, v=w: u + t", ["f"], {"w", "t"}, []),
    ("y = [i for i in a if c]", ["y"], {"a", "c"}, []),
    ("def f(a, *b, c=d, **e):\n    g = a\n    return g + h", ["f"], {"d", "h"}, []),
    ("@dec\ndef f():\n    pass", ["f"], {"dec"}, []),
    ("class A(B):\n    x = y", ["x", "A"], {"B", "y"}, []),
    ("import a.b, c as d\nfrom e import f", ["a", "d", "f"], set(), []),
    ("with a as b:\n    pass", ["b"], {"a"}, []),
    ("if (n := f()):\n    x = n", ["n", "x"], {"f", "n"}, []),
    ("x, (y, *z) = w", ["x", "y", "z"], {"w"}, []),
]


@pytest.mark.parametrize(("code", "stored", "read", "first"), CODE)
def test_names(code, stored, read, first) -> None:
    nodes = name_uses.parsed(code)
    assert sorted(name_uses.stores(nodes)) == sorted(stored)
    assert name_uses.free_loads(nodes) == read
    assert name_uses.read_first(nodes) == first


@pytest.mark.parametrize(
    ("code", "jump"),
    [
        ("def f():\n    return 1", None),
        ("for x in y:\n    break", None),
        ("while x:\n    if y:\n        continue", None),
        ("x = 1", None),
        ("if x:\n    continue", "continue"),
        ("return x", "return"),
        ("x = yield y", "yield"),
        ("global x", "global"),
        ("del x", "delete"),
    ],
)
def test_jump(code, jump) -> None:
    assert name_uses.has_jump(name_uses.parsed(code)) == jump


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


def test_method_that_replicas_run() -> None:
    same(
        """
        class A:
            @tf.function(jit_compile=True)
            def step(self, x):
                return x
            def train(self, x):
                return self.strategy.run(self.step, args=(x,))
        """,
        """
        class A:
            def step(self, x):
                return x
            def train(self, x):
                return self.strategy.run(self.step, args=(x,))
        """,
    )


def test_other_functions_are_compiled() -> None:
    same(
        """
        @tf.function(input_signature=[a], jit_compile=True)
        def f(x):
            return strategy.run(g, args=(x,))
        @other
        @tf.function
        def h(x):
            return x
        """,
        """
        @sg.function(jit_compile=True)
        def f(x):
            return strategy.run(g, args=(x,))
        @other
        @sg.function
        def h(x):
            return x
        """,
    )


def test_loop_over_a_range() -> None:
    same("for i in tf.range(3):\n    f(i)\n", "for i in range(3):\n    f(i)\n")


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


def test_comments_of_a_dropped_argument_do_not_break_the_call() -> None:
    text = "y = tf.zeros([2], name='z',  # zeros\n    dtype=tf.int32)\n"
    assert body(text) == 'y = keras.ops.zeros([2], dtype="int32")\n'


# Calls of `gradient` and `minimize` in a list of statements.


def _find(code: str):
    return find_gradients(cst.parse_module(code).body, "t")


def test_assignment() -> None:
    (call,) = _find("x = 1\na, b = t.gradient(loss, m.w + n)\n")
    assert (call.index, call.loss, call.target, call.remaining) == (1, "loss", "(a, b)", ())
    assert call.loss_names == {"loss"}
    assert call.source_names == {"m", "n"}


def test_within_another_call() -> None:
    (call,) = _find("o.apply_gradients(zip(t.gradient(sources=v, target=a * b), v))\n")
    assert (call.loss, call.loss_names, call.target) == (None, {"a", "b"}, "gradients")
    assert [code_of(one) for one in call.remaining] == ["o.apply_gradients(zip(gradients, v))\n"]


def test_other_tapes_and_statements() -> None:
    assert _find("g = u.gradient(loss, v)\no.minimize(f, v)\nt.stop()\n") == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("g = t.gradient(l, v); x = 1\n", "nested statement"),
        ("g = t.gradient(l)\n", "other arguments"),
    ],
)
def test_unusual(code, words) -> None:
    with pytest.raises(UnusualTapeError, match=words):
        _find(code)


# Calls whose counterpart depends on their arguments.


def _call(code: str) -> cst.Call:
    return cst.ensure_type(cst.parse_expression(code), cst.Call)


@pytest.mark.parametrize(
    ("code", "in_step", "expected"),
    [
        ("tf.print()", False, "print()"),
        ("tf.print(x, end='')", False, "print(x, end='')"),
        ("tf.print(x, summarize=3)", False, "print(x)"),
        ("tf.print(x)", True, 'jax.debug.print("{}", x)'),
        ("tf.print('say \"a\"', f(x, 1))", True, 'jax.debug.print("say \\"a\\" {}", f(x, 1))'),
        ("tf.print(*x)", True, "print(*x)"),
    ],
)
def test_print(code, in_step, expected) -> None:
    context = FileContext()
    assert code_of(print_call(_call(code), context, in_step=in_step)) == expected
    assert ("jax" in context.needed) == expected.startswith("jax")


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


# Local names of modules, and comments above statements.


def test_code_has_the_names_of_the_file() -> None:
    context = FileContext({"np": "n"}, taken={"sg", "keras"})
    code = "sg.run(np.asarray(keras.ops.sum(x.sg.y)), 'np.zeros', other.np)"
    expected = "stratagem.run(n.asarray(keras_module.ops.sum(x.sg.y)), 'np.zeros', other.np)"
    assert context.code(code) == expected
    assert context.needed == {"sg", "np", "keras"}
    assert context.import_line("keras") == "import keras as keras_module"
    assert context.import_line("np") == "import numpy as n"


def test_names_of_a_file() -> None:
    code = "import numpy as n\nfrom tensorflow import keras as k\nimport jax\ndef os(sg): pass\n"
    names, taken = module_names(MetadataWrapper(cst.parse_module(code)))
    assert names == {"np": "n", "keras": "k", "jax": "jax"}
    assert {"os", "sg"} <= taken


@pytest.mark.parametrize(("code", "name"), [("a.b.c", "a.b.c"), ("a", "a"), ("a().b", None)])
def test_dotted(code, name) -> None:
    assert dotted(cst.parse_expression(code)) == name


def test_one_comment_for_a_cause() -> None:
    node = cst.parse_statement("# STRATAGEM: tf.a: one, see p\nx\n")
    advice = [Advice("tf.a: two", "p"), Advice("tf.b: one", "p"), Advice("tf.c: three", "p")]
    marked = with_marks(with_marks(node, advice), advice)
    assert code_of(marked) == "# STRATAGEM: tf.a: one, see p\n# STRATAGEM: tf.c: three, see p\nx\n"


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


# Statements of each loss of a block.


def _split(block: str, *calls: str) -> list[tuple[str, list[str]]]:
    found = [one for call in calls for one in find_gradients(cst.parse_module(call).body, "t")]
    parts = split_losses(cst.parse_module(block).body, found)
    return [("".join(code_of(one) for one in part.statements), part.repeated) for part in parts]


def test_shared_value_is_reused_unless_it_depends_on_the_variables() -> None:
    block = "x = f(a)\ny = w(x)\nm.update(y)\nk = g(y)\nl = h(y)\n"
    assert _split(block, "p = t.gradient(k, v)\n", "q = t.gradient(l, u)\n") == [
        ("x = f(a)\ny = w(x)\nm.update(y)\nk = g(y)\n", []),
        ("l = h(y)\n", []),
    ]
    assert _split(block, "p = t.gradient(k, v)\n", "q = t.gradient(l, w.weights)\n") == [
        ("x = f(a)\ny = w(x)\nm.update(y)\nk = g(y)\n", []),
        ("y = w(x)\nl = h(y)\n", ["y"]),
    ]


def test_loss_outside_of_the_block() -> None:
    with pytest.raises(UnusualTapeError, match="outside of the block"):
        _split("k = f()\n", "p = t.gradient(k, v)\n", "q = t.gradient(l, v)\n")
