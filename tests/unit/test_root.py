"""The lazy root: what it loads, the Keras backend it selects, and the objects behind its names."""

from __future__ import annotations

from pathlib import Path

import pytest

import stratagem as sg
from tests.fresh_process import run_fresh

# A Keras that chooses its backend as the real one does, and has nothing else.
KERAS = """
import os, types
_backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
config = types.SimpleNamespace(backend=lambda: _backend)
"""
LIGHT_NAMES = [
    "config",
    "errors",
    "launch",
    "ReduceOp",
    "RunOptions",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder whose `keras` stands in for the real one."""
    (tmp_path / "keras.py").write_text(KERAS)
    return tmp_path


@pytest.mark.parametrize("chosen", [None, ""])
def test_import_before_keras_selects_jax(folder, chosen) -> None:
    program = "import stratagem, keras; print(keras.config.backend())"
    assert run_fresh(program, folder=folder, KERAS_BACKEND=chosen) == ["jax"]


@pytest.mark.slow
def test_real_keras_runs_on_jax_when_stratagem_was_imported_first() -> None:
    program = "import stratagem, keras; print(keras.config.backend())"
    assert run_fresh(program, KERAS_BACKEND=None)[-1] == "jax"


def test_import_after_keras_on_another_backend_names_the_fix(folder) -> None:
    program = "import keras\ntry:\n    import stratagem\nexcept ImportError as e:\n    print(e)"
    assert run_fresh(program, folder=folder, KERAS_BACKEND=None) == [
        "Keras runs on the 'tensorflow' backend.",
        "Expected the 'jax' backend, which cannot be changed once Keras is loaded.",
        "Fix: put `import stratagem` before `import keras`, or set KERAS_BACKEND=jax.",
        "Help: stratagem explain SG101",
    ]


def test_backend_that_the_user_chose_is_kept_until_a_name_needs_jax(folder) -> None:
    program = """
import sys
import stratagem, keras
print(keras.config.backend(), stratagem.ReduceOp.SUM)
try:
    stratagem.MirroredStrategy
except ImportError as error:
    print(str(error).splitlines()[0], 'jax' in sys.modules)
"""
    assert run_fresh(program, folder=folder, KERAS_BACKEND="torch") == [
        "torch ReduceOp.SUM",
        "Keras runs on the 'torch' backend. False",
    ]


def test_choice_of_another_backend_is_reported_before_keras_fails(folder) -> None:
    program = """
import sys
import stratagem
try:
    stratagem.MirroredStrategy
except ImportError as error:
    print(error)
print('keras' in sys.modules)
"""
    assert run_fresh(program, folder=folder, KERAS_BACKEND="torch") == [
        "KERAS_BACKEND is 'torch'.",
        "Expected 'jax', or no value; stratagem then selects it.",
        "Fix: unset KERAS_BACKEND, or set KERAS_BACKEND=jax.",
        "Help: stratagem explain SG101",
        "False",
    ]


def test_names_that_need_no_jax_load_none() -> None:
    program = f"""
import sys
import stratagem
for name in {LIGHT_NAMES}:
    getattr(stratagem, name)
stratagem.config.run_eagerly(False)
print(*({{'jax', 'keras'}} & set(sys.modules)))
"""
    assert run_fresh(program) == [""]


def test_each_name_is_listed_once() -> None:
    assert all(hasattr(sg, name) for name in sg.__all__)
    assert len(dir(sg)) == len(set(dir(sg)))


@pytest.mark.parametrize("name", sg.__all__)
def test_public_name_is_there_and_stays_the_same(name) -> None:
    assert name in dir(sg)
    assert getattr(sg, name) is getattr(sg, name)
    assert name in vars(sg)


def test_old_names_are_the_same_objects() -> None:
    assert sg.experimental_set_strategy is sg.set_strategy
    assert sg.run_standard_tensorflow_server is sg.run_standard_server
    strategy = sg.Strategy
    assert strategy.experimental_local_results is strategy.local_results
    assert strategy.concat is strategy.gather
    assert (
        strategy.experimental_distribute_values_from_function
        is strategy.distribute_values_from_function
    )


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(
        AttributeError, match="module 'stratagem' has no attribute 'MiroredStrategy'"
    ):
        _ = sg.MiroredStrategy
