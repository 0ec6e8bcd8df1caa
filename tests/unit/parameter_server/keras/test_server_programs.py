"""Programs with a worker and a server in processes of their own equal one device."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
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

_QUICK = ("functional_model_with_a_stateless_step", "optimizer_without_a_config")


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


@pytest.mark.parametrize("kind", ["metric", "schedule"])
def test_classes_of_no_module_equal_one_device(servers: Any, kind: str) -> None:
    """They are sent by value, as those of a script, of which test_user_kinds.py has all kinds."""
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
