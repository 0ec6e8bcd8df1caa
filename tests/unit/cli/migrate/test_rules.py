"""Names, enum members, methods and devices."""

from __future__ import annotations

import builtins
import importlib
import inspect
import tomllib
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.cli.migrate import rules
from stratagem.cli.migrate.rules import exists
from stratagem.cli.migrate.symbols import Symbol
from tests.unit.cli.migrate.programs import SG, body, rewritten, same

NAMES = [
    ("tf.distribute.MirroredStrategy()", "sg.MirroredStrategy()"),
    (
        "tf.distribute.experimental.MultiWorkerMirroredStrategy()",
        "sg.experimental.MultiWorkerMirroredStrategy()",
    ),
    ("tf.contrib.distribute.MirroredStrategy()", "sg.MirroredStrategy()"),
    ("tf.distribute.ReduceOp.SUM", "sg.ReduceOp.SUM"),
    (
        "tf.distribute.cluster_resolver.TFConfigClusterResolver()",
        "sg.cluster_resolver.TFConfigClusterResolver()",
    ),
    (
        "tf.distribute.experimental.partitioners.MinSizePartitioner()",
        "sg.partitioners.MinSizePartitioner()",
    ),
    ("tf.keras.layers.Dense(3)", "keras.layers.Dense(3)"),
    ("tf.keras.losses.Reduction.NONE", '"none"'),
    ("tf.keras.optimizers.legacy.SGD(lr=0.1)", "keras.optimizers.SGD(learning_rate=0.1)"),
    ("tf.keras.callbacks.BackupAndRestore(d)", "sg.BackupAndRestore(d)"),
    ("tf.keras.layers.experimental.preprocessing.Rescaling(2)", "keras.layers.Rescaling(2)"),
    ("tf.metrics.Mean()", "keras.metrics.Mean()"),
    ("tf.train.Checkpoint(model=m)", "sg.train.Checkpoint(model=m)"),
    ("tf.compat.v1.train.get_or_create_global_step()", "sg.train.get_or_create_global_step()"),
    ("tf.summary.scalar('a', 1, step=2)", "sg.summary.scalar('a', 1, step=2)"),
    ("tf.nn.compute_average_loss(x)", "sg.nn.compute_average_loss(x)"),
    ("tf.config.run_functions_eagerly(True)", "sg.config.run_eagerly(True)"),
    ("tf.dtypes.float32", '"float32"'),
    ("(tf.int32)", '("int32")'),
    ("tf.Tensor", "jax.Array"),
    ("tf.__version__", "sg.__version__"),
    ("tf.data.AUTOTUNE", "-1"),
    ("tf.config.list_physical_devices()", "jax.devices()"),
    (
        "tf.config.list_physical_devices('GPU')",
        '[one for one in jax.devices() if one.platform == "gpu"]',
    ),
    (
        "tf.config.list_physical_devices(device_type=k)",
        "[one for one in jax.devices() if one.platform == k.lower()]",
    ),
    ("tf.io.gfile.rmtree(d)", "shutil.rmtree(d)"),
    ("tf.io.gfile.makedirs(d)", "os.makedirs(d, exist_ok=True)"),
    ("metric.reset_states()", "metric.reset_state()"),
    ("strategy.experimental_run_v2(f, args=(x,))", "strategy.run(f, args=(x,))"),
    ("loss.numpy()", "np.asarray(loss)"),
    ("o.minimize(x, global_step=s)", "sg.estimator.minimize(o, x)"),
    ("o.minimize(global_step=s, loss=x)", "sg.estimator.minimize(o, x)"),
    ("model.optimizer.lr", "model.optimizer.learning_rate"),
    ("model.fit(x, workers=2, epochs=1)", "model.fit(x, epochs=1)"),
    ("model.fit_generator(g)", "model.fit(g)"),
]


@pytest.mark.parametrize(("before", "after"), NAMES)
def test_name(before, after) -> None:
    assert body(f"y = {before}\n") == f"y = {after}\n"


ALIASES = [
    ("import tensorflow as tf\ntf.keras.Model\n", f"{SG}import keras\nkeras.Model\n"),
    ("import tensorflow\ntensorflow.keras.Model\n", f"{SG}import keras\nkeras.Model\n"),
    ("import tensorflow.compat.v1 as tf\ntf.keras.Model\n", f"{SG}import keras\nkeras.Model\n"),
    ("import tensorflow.keras\ntensorflow.keras.Model\n", f"{SG}import keras\nkeras.Model\n"),
    ("from tensorflow import keras\nkeras.Model\n", f"{SG}import keras\nkeras.Model\n"),
    ("from tensorflow import keras as k\nk.Model\n", f"{SG}import keras as k\nk.Model\n"),
    (
        "import tensorflow.keras.layers as L\nL.Dense(1)\n",
        f"{SG}import keras.layers as L\nL.Dense(1)\n",
    ),
    (
        "from tensorflow.keras import layers\nlayers.Dense(1)\n",
        f"{SG}from keras import layers\nlayers.Dense(1)\n",
    ),
    (
        "from tensorflow.keras.layers import Dense as D\nD(1)\n",
        f"{SG}from keras.layers import Dense as D\nD(1)\n",
    ),
    (
        "from tensorflow.keras.callbacks import TensorBoard\nTensorBoard(log_dir='a')\n",
        f"{SG}sg.TensorBoard(log_dir='a')\n",
    ),
    (
        "from tensorflow.keras import optimizers\noptimizers.legacy.SGD()\n",
        f"{SG}from keras import optimizers\noptimizers.SGD()\n",
    ),
    ("import tensorflow.python.keras as k\nk.Model\n", f"{SG}import keras as k\nk.Model\n"),
    (
        "keras = 3\nimport tensorflow as tf\ntf.keras.Model\n",
        f"keras = 3\n{SG}import keras as keras_module\nkeras_module.Model\n",
    ),
    ("from tensorflow import reduce_mean as m\nm(x)\n", f"{SG}import keras\nkeras.ops.mean(x)\n"),
    (
        "import tensorflow as tf\nkeras = tf.keras\nkeras.Model\n",
        f"{SG}import keras\nkeras.Model\n",
    ),
    (
        "import tensorflow as tf\nK = tf.keras.backend\nK.square(x)\nK.floatx()\n",
        f"{SG}import keras\nfrom keras import backend as K\nkeras.ops.square(x)\nK.floatx()\n",
    ),
    (
        "import numpy as n\nimport tensorflow as tf\ny.numpy()\n",
        f"import numpy as n\n{SG}n.asarray(y)\n",
    ),
    (
        "import sagemaker as sg\nimport tensorflow as tf\ntf.distribute.get_strategy()\n",
        f"import sagemaker as sg\n{SG.replace(' as sg', '')}stratagem.get_strategy()\n",
    ),
]


@pytest.mark.parametrize(("before", "after"), ALIASES)
def test_alias(before, after) -> None:
    assert rewritten(before) == after


def test_names_of_other_things_stay() -> None:
    text = (
        "class A:\n  def function(self, reduce_mean=1):\n    return self.function(reduce_mean=2)\n"
    )
    assert body(text) == text


def test_local_variable_hides_the_module() -> None:
    text = "def f(tf):\n    return tf.reduce_mean(1)\n"
    assert body(text) == text


def test_statements_without_use_are_dropped() -> None:
    same(
        """
        gpus = tf.config.list_physical_devices("GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        tf.get_logger().setLevel("ERROR")
        os.environ["KERAS_BACKEND"] = "tensorflow"
        """,
        """
        gpus = [one for one in jax.devices() if one.platform == "gpu"]
        for gpu in gpus:
            pass
        """,
    )


@pytest.mark.parametrize(
    ("statement", "cause"),
    [
        ("tf.keras.layers.Foo()", "tf.keras.layers.Foo: Keras 3 has no such name"),
        ("tf.saved_model.save(m, p)", "tf.saved_model.save: Exports one function."),
        ("x = tf.strings.join(y)", "tf.strings.join: JAX has no strings"),
        ("x = tf.matmul(a, b, True)", "tf.matmul: keras.ops.matmul has no transpose_a"),
        ("x = tf.keras.layers.StringLookup()", "It computes with TensorFlow, also in Keras 3."),
        ("x = tf.float32.max", "tf.float32.max: there is no counterpart"),
        ("o = tf.keras.optimizers.SGD(decay=1)", "InverseTimeDecay as learning_rate"),
    ],
)
def test_place_without_a_counterpart_is_marked_once(statement, cause) -> None:
    lines = body(f"{statement}\n").splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("# STRATAGEM: ")
    assert cause in lines[0]


def test_print_is_jax_debug_print_in_a_step() -> None:
    same(
        """
        def step(x):
            tf.print("loss", x, "{}")
            tf.print('say "a"', f(x, 1))
            tf.print(*x)
        strategy.run(step, args=(x,))
        tf.print("done", x, output_stream=f)
        tf.print()
        tf.print(x, end='', summarize=3)
        """,
        """
        def step(x):
            jax.debug.print("loss {} {{}}", x)
            jax.debug.print("say \\"a\\" {}", f(x, 1))
            print(*x)
        strategy.run(step, args=(x,))
        print("done", x)
        print()
        print(x, end='')
        """,
    )


def test_random_numbers_in_a_step_need_a_seed() -> None:
    text = body("def step():\n    return tf.random.normal([2])\ns.run(step)\n")
    assert text.splitlines()[1].lstrip().startswith("# STRATAGEM: in a step, pass seed=")
    assert "keras.random.normal([2])" in text
    assert "# STRATAGEM" not in body("def f():\n    return tf.random.normal([2])\n")


# tf.data pipelines: chains, chains of several statements, and unknown operations.

CHAINS = [
    ("from_tensor_slices((x, y)).batch(8)", "sg.input.Dataset((x, y), batch_size=8)"),
    (
        "from_tensor_slices(x).shuffle(9).batch(8, drop_remainder=True)",
        "sg.input.Dataset(x, batch_size=8, shuffle=True, drop_remainder=True)",
    ),
    (
        "from_tensor_slices(x).cache().shuffle(9, seed=1).repeat(2).batch(8).prefetch(2)",
        "sg.input.Dataset(x, batch_size=8, shuffle=True, seed=1).repeat(2)",
    ),
    (
        "from_tensor_slices(x).shard(n, i).batch(8).repeat()",
        "sg.input.Dataset(x, batch_size=8).shard(n, i).repeat()",
    ),
    ("range(9).batch(batch_size=2)", "sg.input.Dataset(np.arange(9), batch_size=2)"),
    (
        "from_tensors((a, b)).repeat(9).batch(2)",
        "sg.input.Dataset((np.repeat([a], 9, axis=0), np.repeat([b], 9, axis=0)), batch_size=2)",
    ),
    (
        "from_tensors(a).repeat(9).batch(2)",
        "sg.input.Dataset(np.repeat([a], 9, axis=0), batch_size=2)",
    ),
    (
        "from_generator(g, output_types=tf.float32, args=(1,))",
        "sg.input.Dataset.from_generator(g, args=(1,))",
    ),
]


@pytest.mark.parametrize(("before", "after"), CHAINS)
def test_chain(before, after) -> None:
    assert body(f"d = tf.data.Dataset.{before}\n") == f"d = {after}\n"


def test_long_chain_has_lines() -> None:
    text = body(f"d = tf.data.Dataset.from_tensor_slices(({'a' * 40}, y)).shuffle(9).batch(size)\n")
    first = f"    ({'a' * 40}, y), batch_size=size, shuffle=True\n"
    assert text == f"d = sg.input.Dataset(\n{first})\n"
    text = body(f"d = tf.data.Dataset.from_tensor_slices(({'a' * 70}, y)).shuffle(9).batch(size)\n")
    assert text.count("\n") == 5


def test_chain_of_several_statements() -> None:
    same(
        """
        def f():
            d = tf.data.Dataset.from_tensor_slices(x)
            d = d.shuffle(10).repeat()
            n = 3
            d = d.batch(4)
            d = d.prefetch(tf.data.AUTOTUNE)
            return d
        """,
        """
        def f():
            d = sg.input.Dataset(x, batch_size=4, shuffle=True).repeat()
            n = 3
            return d
        """,
    )


@pytest.mark.parametrize("between", ["n = f()", "print(d)", "d = f()"])
def test_statement_between_that_matters_ends_the_chain(between) -> None:
    text = body(f"d = tf.data.Dataset.from_tensor_slices(x)\n{between}\nd = d.batch(n)\n")
    assert "no batch()" in text
    assert text.endswith(f"{between}\nd = d.batch(n)\n")


def test_options_stay_outside_of_the_chain() -> None:
    text = body("d = tf.data.Dataset.range(8).batch(2)\nd = d.with_options(o)\n")
    assert text == "d = sg.input.Dataset(np.arange(8), batch_size=2)\nd = d.with_options(o)\n"


UNKNOWN = [
    ("from_tensor_slices(x)", "no batch()"),
    ("from_tensor_slices(x).map(f).batch(2)", "map()"),
    ("from_tensor_slices(x).batch(2).map(f)", "map() of batches"),
    ("from_tensor_slices(x).batch(2).shuffle(3)", "shuffle() of batches"),
    ("from_tensor_slices(x).batch(2).batch(3)", "batch() twice"),
    ("from_tensors(x).batch(2)", "from_tensors()"),
    ("from_tensors(x).repeat().batch(2)", "repeat() without a count"),
    ("from_generator(g, tf.int32).batch(2)", "batch() of batches"),
    ("zip((a, b)).batch(2)", "zip()"),
    ("from_tensor_slices(x).batch(*a)", "arguments with a star"),
]


@pytest.mark.parametrize(("chain", "reason"), UNKNOWN)
def test_unknown_chain_is_marked_once(chain, reason) -> None:
    mark, line = body(f"d = tf.data.Dataset.{chain}\n").splitlines()
    assert f": {reason}: write it as sg.input.Dataset" in mark
    assert line.startswith("d = tf.data.Dataset.")


def test_lazy_statements_of_an_unknown_chain_stay() -> None:
    code = "d = tf.data.Dataset.from_tensor_slices(x)\nd = d.map(f)\nd = d.batch(2)\n"
    mark, *rest = body(code).splitlines(keepends=True)
    assert ": map(): " in mark
    assert "".join(rest) == code


# The table of rules, against Keras, JAX and this package as they are installed.

_TABLE = tomllib.loads(Path(rules.__file__).with_name("renames.toml").read_text(encoding="utf-8"))
_ROOTS = {"sg": sg, "keras": keras, "jax": jax, "np": np}
_DOCS = Path(__file__).parents[4]
_CALLS = {name: text for name, text in _TABLE["calls"].items() if text}


def value_of(target: str) -> object:
    root, *parts = target.split(".")
    if not parts:
        return getattr(builtins, root)
    value = _ROOTS.get(root) or importlib.import_module(root)
    for part in parts:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", sorted(_CALLS))
def test_counterpart_has_the_arguments(name) -> None:
    call = rules.resolve(name).call
    new = {one.new for one in call.arguments if one.new not in ("", "_") and not one.refused}
    function = value_of(call.target)
    if new and function is not open:
        parameters = inspect.signature(function).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        assert takes_any or new <= set(parameters)


@pytest.mark.parametrize("name", sorted(name for name, new in _TABLE["names"].items() if new))
def test_new_name_exists(name) -> None:
    target = _TABLE["names"][name]
    if target.replace(".", "_").isidentifier() and target != "None":
        value_of(target)


@pytest.mark.parametrize(
    ("name", "target"),
    [(f"{old}.x", new) for old, new in _TABLE["prefixes"].items() if new != "keras"],
)
def test_prefix_exists_here(name, target) -> None:
    value_of(f"{target}.__name__")
    assert rules.resolve(name) is None  # there is no x


@pytest.mark.parametrize("name", sorted(_TABLE["aliases"]))
def test_alias_has_a_rule(name) -> None:
    new = _TABLE["aliases"][name]
    special = new.startswith(("config.list_", "compat."))
    assert special or rules.resolve(name) is not None


def test_pages_of_the_advice_exist() -> None:
    pages = {page for _, page in [*_TABLE["marks"].values(), *_TABLE["modules"].values()]}
    assert [page for page in sorted(pages) if not (_DOCS / page).is_file()] == []


def test_advice_takes_its_text_from_the_table_of_symbols(monkeypatch) -> None:
    row = Symbol("tf.foo.bar", "", "absent", "Use baz.")
    monkeypatch.setattr(rules, "load_symbols", lambda: [row])
    rules._differences.cache_clear()
    assert str(rules.advice("foo.bar")) == "tf.foo.bar: Use baz, see docs/migrate/tool.md"
    rules._differences.cache_clear()


# Names of Keras and of this package, read from files.


@pytest.mark.parametrize("module", ["layers", "losses", "ops", "callbacks", "utils", "backend"])
def test_names_of_keras_are_those_that_it_has(module) -> None:
    names = [name for name in dir(getattr(keras, module)) if not name.startswith("_")]
    assert [name for name in names if not exists(f"keras.{module}.{name}")] == []
    assert not exists(f"keras.{module}.Missing")
