"""Names of Keras and of this package, read from files."""

from __future__ import annotations

import keras
import pytest

from stratagem.cli.migrate.rules import exists


@pytest.mark.parametrize("module", ["layers", "losses", "ops", "callbacks", "utils", "backend"])
def test_names_of_keras_are_those_that_it_has(module) -> None:
    names = [name for name in dir(getattr(keras, module)) if not name.startswith("_")]
    assert [name for name in names if not exists(f"keras.{module}.{name}")] == []
    assert not exists(f"keras.{module}.Missing")


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("sg", True),
        ("sg.MirroredStrategy", True),
        ("sg.MirroredStrategy.anything", True),
        ("sg.ReduceOp.SUM", True),
        ("sg.Missing", False),
        ("sg.summary.scalar", True),
        ("sg.summary.trace_on", False),
        ("sg.nn.compute_average_loss", True),
        ("sg.nn.relu", False),
        ("sg.cluster_resolver.SlurmClusterResolver", True),
        ("sg.estimator.RunConfig", True),
        ("sg.estimator.experimental.stop_if_no_decrease_hook", True),
        ("sg.__version__", True),
        ("keras", True),
        ("keras.datasets.mnist.load_data", True),
        ("keras.datasets.missing", False),
        ("jax.anything", True),
    ],
)
def test_exists(name, is_there) -> None:
    assert exists(name) is is_there
