"""Names, enum members, methods and devices."""

from __future__ import annotations

import pytest

from tests.unit.cli.migrate.programs import SG, body, rewritten, same

NAMES = [
    ("tf.distribute.MirroredStrategy()", "sg.MirroredStrategy()"),
    ("tf.distribute.experimental.CentralStorageStrategy()", "sg.CentralStorageStrategy()"),
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
    ("tf.distribute.coordinator.ClusterCoordinator(s)", "sg.coordinator.ClusterCoordinator(s)"),
    ("tf.keras.layers.Dense(3)", "keras.layers.Dense(3)"),
    ("tf.keras.losses.Reduction.NONE", '"none"'),
    ("tf.keras.optimizers.legacy.SGD(lr=0.1)", "keras.optimizers.SGD(learning_rate=0.1)"),
    ("tf.keras.callbacks.BackupAndRestore(d)", "sg.BackupAndRestore(d)"),
    ("tf.keras.callbacks.TensorBoard(log_dir=d)", "sg.TensorBoard(log_dir=d)"),
    ("tf.keras.layers.experimental.preprocessing.Rescaling(2)", "keras.layers.Rescaling(2)"),
    ("tf.metrics.Mean()", "keras.metrics.Mean()"),
    ("tf.train.Checkpoint(model=m)", "sg.train.Checkpoint(model=m)"),
    ("tf.compat.v1.train.get_or_create_global_step()", "sg.train.get_or_create_global_step()"),
    ("tf.summary.scalar('a', 1, step=2)", "sg.summary.scalar('a', 1, step=2)"),
    ("tf.estimator.RunConfig(model_dir=d)", "sg.estimator.RunConfig(model_dir=d)"),
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
        strategy.run(step, args=(x,))
        tf.print("done", x, output_stream=f)
        """,
        """
        def step(x):
            jax.debug.print("loss {} {{}}", x)
        strategy.run(step, args=(x,))
        print("done", x)
        """,
    )


def test_random_numbers_in_a_step_need_a_seed() -> None:
    text = body("def step():\n    return tf.random.normal([2])\ns.run(step)\n")
    assert text.splitlines()[1].lstrip().startswith("# STRATAGEM: in a step, pass seed=")
    assert "keras.random.normal([2])" in text
    assert "# STRATAGEM" not in body("def f():\n    return tf.random.normal([2])\n")
