"""Devices that OneDeviceStrategy takes and refuses, and the place of its variables."""

from __future__ import annotations

import jax
import pytest

import stratagem as sg


@pytest.mark.parametrize("device", ["cpu:3", "/cpu:3", 3, jax.devices()[3]], ids=repr)
def test_one_device_takes_a_device(device) -> None:
    strategy = sg.OneDeviceStrategy(device)
    assert strategy.topology.devices == (jax.devices()[3],)
    assert strategy.extended.worker_devices == (jax.devices()[3],)
    assert repr(strategy) == "OneDeviceStrategy(cpu:3)"


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("cpu:99", ValueError, "cpu:99 does not exist"),
        ("tpu:0", ValueError, "tpu:0 does not exist"),
        ("", ValueError, "is not a device name"),
        (None, TypeError, "device None is of type NoneType"),
        (["cpu:0"], TypeError, r"device \['cpu:0'\] is of type list"),
    ],
    ids=str,
)
def test_one_device_refuses_what_names_no_device(device, error, words) -> None:
    with pytest.raises(error, match=words):
        sg.OneDeviceStrategy(device)


def test_one_device_needs_a_device() -> None:
    with pytest.raises(TypeError, match="device"):
        sg.OneDeviceStrategy()


def test_variables_and_results_of_one_device_lie_on_it() -> None:
    strategy = sg.OneDeviceStrategy("cpu:3")
    with strategy.scope():
        variable = sg.Variable(1.0)
    assert variable.value.devices() == {jax.devices()[3]}
    assert strategy.run(lambda: variable + 1.0).devices() == {jax.devices()[3]}
