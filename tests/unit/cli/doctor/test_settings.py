"""Environment variables with mistakes, and scripts whose imports are out of order."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.cli.doctor.settings import (
    Finding,
    Level,
    check_script,
    check_settings,
    keras_backend,
)


def _check(variables: dict[str, str], tmp_path: Path) -> list[Finding]:
    return check_settings(variables, tmp_path / "keras.json")


def test_clean_environment_is_fine(tmp_path: Path) -> None:
    variables = {
        "KERAS_BACKEND": "jax",
        "STRATAGEM_PEER_TIMEOUT_S": "5",
        "STRATAGEM_RUN_DIR": "/runs/1",
        "STRATAGEM_WORKERS": "4",
        "STRATAGEM_CONFIG": "stratagem.toml",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".8",
        "NCCL_P2P_DISABLE": "0",
    }
    assert [one.level for one in _check(variables, tmp_path)] == [Level.OK]


@pytest.mark.parametrize(
    ("name", "value", "level", "text", "fix"),
    [
        ("KERAS_BACKEND", "torch", Level.ERROR, "KERAS_BACKEND=torch", "KERAS_BACKEND=jax"),
        (
            "STRATAGEM_PEER_TIMOUT_S",
            "5",
            Level.WARNING,
            "is not a setting",
            "write STRATAGEM_PEER_TIMEOUT_S",
        ),
        ("STRATAGEM_LOG_LEVEL", "loud", Level.ERROR, "not a log level", "Default: auto."),
        ("STRATAGEM_PEER_TIMEOUT_S", "soon", Level.ERROR, "not a time limit", "Default: 30.0"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "1.5", Level.ERROR, "no fraction", "below 1"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "80%", Level.ERROR, "no fraction", "below 1"),
        ("XLA_CLIENT_MEM_FRACTION", "0", Level.ERROR, "no fraction", "below 1"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "bfs", Level.ERROR, "not an allocator", "set one of"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "no", Level.WARNING, "counts as true", "=false"),
        ("NCCL_P2P_DISABLE", "1", Level.WARNING, "through host memory", "unset"),
        ("JAX_DISABLE_JIT", "true", Level.WARNING, "nothing is compiled", "unset"),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "true", Level.NOTE, "has no effect", ""),
    ],
)
def test_mistake_is_named_with_its_fix(
    name: str, value: str, level: Level, text: str, fix: str, tmp_path: Path
) -> None:
    (finding,) = _check({name: value}, tmp_path)
    assert finding.level is level
    assert text in finding.text
    assert fix in finding.fix


def test_both_names_of_one_setting_are_an_error(tmp_path: Path) -> None:
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    (finding,) = _check(dict.fromkeys(names, "0.5"), tmp_path)
    assert finding.level is Level.ERROR
    assert finding.fix == "unset XLA_PYTHON_CLIENT_MEM_FRACTION, the old name."


@pytest.mark.parametrize(
    ("variables", "config", "backend"),
    [
        ({"KERAS_BACKEND": "torch"}, '{"backend": "jax"}', "torch"),
        ({}, '{"backend": "jax"}', "jax"),
        ({"KERAS_BACKEND": ""}, None, "tensorflow"),
        ({}, "{", "tensorflow"),
    ],
)
def test_backend_of_keras_alone_is_that_of_its_rules(
    variables: dict[str, str], config: str | None, backend: str, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "keras.json").write_text(config)
    assert keras_backend(variables, tmp_path / "keras.json") == backend


@pytest.mark.parametrize(
    ("config", "num_notes"),
    [('{"backend": "tensorflow"}', 1), ('{"backend": "jax"}', 0), ("{", 0), ("[]", 0)],
)
def test_other_backend_in_the_configuration_of_keras_is_a_note(
    config: str, num_notes: int, tmp_path: Path
) -> None:
    (tmp_path / "keras.json").write_text(config)
    notes = [one for one in _check({}, tmp_path) if one.level is Level.NOTE]
    assert len(notes) == num_notes
    assert len([one for one in _check({"KERAS_BACKEND": "jax"}, tmp_path) if one.fix]) == 0


@pytest.mark.parametrize(
    ("script", "level", "text"),
    [
        ("import stratagem as sg\nimport keras\n", Level.OK, "with the jax backend"),
        ("import stratagem\nfrom tensorflow import keras\n", Level.ERROR, ":2 uses tf.keras"),
        ("import stratagem\nimport tensorflow.keras as k\n", Level.ERROR, ":2 uses tf.keras"),
        ("import stratagem\nimport tensorflow as tf\ntf.data\n", Level.OK, "jax"),
        ("import stratagem\ntf.keras.Model()\n", Level.ERROR, ":2 uses tf.keras"),
        ("import keras\nimport stratagem as sg\n", Level.ERROR, ":1 imports keras before"),
        ("from keras.layers import Dense\nimport stratagem\n", Level.ERROR, ":1 imports keras"),
        ("import keras\n", Level.NOTE, "does not import stratagem"),
        ("from .keras import a\nimport stratagem\nimport keras\n", Level.OK, "jax"),
        ("import = 1\n", Level.ERROR, ":1: invalid syntax"),
    ],
)
def test_order_of_imports_is_checked(script: str, level: Level, text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    (finding,) = check_script(path, "tensorflow")
    assert finding.level is level
    assert text in finding.text


def test_keras_first_is_fine_on_jax(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import keras\nimport stratagem as sg\n")
    (finding,) = check_script(path, "jax")
    assert finding.level is Level.OK
