"""Programs with a worker and a server in processes of their own equal one device."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.parameter_server.keras import user_kinds
from tests.unit.parameter_server.keras.server_programs import PROGRAMS
from validation.third_party.comparison import assert_like_plain_keras
from validation.third_party.programs.measuring import Place, run_program

_QUICK = ("functional_model_with_a_stateless_step",)


@pytest.fixture(scope="module")
def servers() -> Iterator[Any]:
    """One server, and a worker with two devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "2")
        with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
            yield strategy


@pytest.fixture(autouse=True)
def ordinary_process() -> Iterator[None]:
    """Types are promoted as by default: the strict rule of our tests is not that of users."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in PROGRAMS],
)
def test_program_equals_one_device(servers: Any, name: str) -> None:
    one = sg.OneDeviceStrategy("cpu:0")
    expected = run_program(PROGRAMS[name], Place(one.scope, one))
    assert_like_plain_keras(PROGRAMS[name], servers, expected)


@pytest.mark.parametrize("kind", ["metric", "schedule", "optimizer"])
def test_classes_of_no_module_equal_one_device(servers: Any, kind: str) -> None:
    """They are sent by value, as those of a script; all kinds are below."""
    trained = runpy.run_path(user_kinds.__file__)["trained"]
    _, expected = trained(sg.OneDeviceStrategy("cpu:0"), kind)
    _, measured = trained(servers, kind)
    assert jax.tree.structure(measured) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(measured), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _measured_by_every_kind(strategy: Any) -> dict[str, float]:
    """Seven rows in batches of four: on two devices, a row of the last batch only pads."""
    x = np.arange(7, dtype="float32")[:, None]
    y = (x > 2).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")]
        )
        metrics = [
            "mae",
            "accuracy",
            keras.metrics.AUC(name="auc"),
            keras.metrics.CosineSimilarity(),
            keras.metrics.F1Score(threshold=0.5),
            keras.metrics.MeanMetricWrapper(keras.losses.mean_absolute_error, name="wrapped"),
            keras.metrics.Recall(name="recall"),
            keras.metrics.RootMeanSquaredError(),
            user_kinds.Rows(2.0),
        ]
        model.compile("sgd", "mse", metrics=metrics, weighted_metrics=["mse"])
    fitted = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    evaluated = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    logs = {name: value[0] for name, value in fitted.items()}
    logs |= {f"evaluated {name}": value for name, value in evaluated.items()}
    return {name: np.ravel(value).tolist() for name, value in logs.items()}


def test_metrics_of_a_worker_with_two_devices_count_no_padding(servers: Any) -> None:
    expected = _measured_by_every_kind(sg.OneDeviceStrategy("cpu:0"))
    assert expected["rows"] == expected["evaluated rows"] == [14.0]
    measured = _measured_by_every_kind(servers)
    assert measured == {name: pytest.approx(value, rel=1e-5) for name, value in expected.items()}


# Everything that users define, wherever it is defined.

_PROGRAM = Path(__file__).with_name("user_kinds.py")
_IMPORTING = "import sys, own_kinds\nif __name__ == '__main__':\n    own_kinds.main(sys.argv[1:])\n"
_LIMIT_S = 900


def _run(place: str, folder: Path) -> dict[str, Any]:
    """Runs the program as a script, as a module that a script imports, or in a notebook's way."""
    command, source = [sys.executable, str(_PROGRAM)], None
    if place == "module":
        shutil.copy(_PROGRAM, folder / "own_kinds.py")
        (folder / "main.py").write_text(_IMPORTING)
        command = [sys.executable, str(folder / "main.py")]
    if place == "notebook":  # a main module without a file
        command, source = [sys.executable, "-"], _PROGRAM.read_text()
    done = subprocess.run(
        command,
        input=source,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["script", "module", "notebook"])
def test_kinds_of_users_equal_one_device(tmp_path: Path, place: str) -> None:
    numbers = _run(place, tmp_path)
    expected = numbers.pop("one device")
    assert len(expected) > 10
    for where, measured in numbers.items():
        assert measured.keys() == expected.keys()
        for kind, values in expected.items():
            assert jax.tree.structure(measured[kind]) == jax.tree.structure(values), (where, kind)
            np.testing.assert_allclose(
                np.array(jax.tree.leaves(measured[kind])),
                np.array(jax.tree.leaves(values)),
                rtol=1e-5,
                atol=1e-6,
                err_msg=f"{kind}, {where}",
            )
