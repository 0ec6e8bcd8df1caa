"""Choice of the platform of a test run, and of the device that a test's name stands for."""

from __future__ import annotations

import pytest

from tests.fresh_process import run_fresh
from tests.platforms import (
    MixedDevices,
    are_cpu_devices,
    is_first_cpu_device,
    jax_environment,
    selected_platform,
)


def test_platform_is_the_cpu_unless_the_environment_says_otherwise() -> None:
    assert selected_platform({}) == "cpu"
    assert selected_platform({"STRATAGEM_TEST_PLATFORM": "gpu_alone"}) == "gpu_alone"
    with pytest.raises(ValueError, match=r"'tpu'\. Expected one of cpu, gpu, gpu_alone"):
        selected_platform({"STRATAGEM_TEST_PLATFORM": "tpu"})


def test_environment_of_a_gpu_has_both_platforms_and_leaves_memory_to_others() -> None:
    found = jax_environment({"STRATAGEM_TEST_PLATFORM": "gpu", "JAX_PLATFORMS": "cpu"})
    assert found == {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert jax_environment({"JAX_PLATFORMS": "tpu"}) == {"JAX_PLATFORMS": "tpu"}
    assert jax_environment({}) == {"JAX_PLATFORMS": "cpu"}


def test_mixed_devices_have_the_accelerator_in_the_first_place_only_alone() -> None:
    devices = MixedDevices(["cpu 0", "cpu 1", "cpu 2"], "gpu 0")
    assert devices[0] == "gpu 0"
    assert devices[:1] == ["gpu 0"]
    assert devices[1] == "cpu 1"
    assert devices[:2] == ["cpu 0", "cpu 1"]
    assert list(devices) == ["cpu 0", "cpu 1", "cpu 2"]
    assert len(devices) == 3


@pytest.mark.parametrize(
    ("specs", "is_first", "are_several"),
    [
        (["cpu:0"], True, True),
        (["/device:CPU:0"], True, True),
        (["cpu"], True, True),
        (["cpu:1"], False, True),
        (["cpu:0", "cpu:1"], False, True),
        (["cpu:0", "cpu:0"], False, False),
        (["cpu:0", 1], False, False),
        (["gpu:0"], False, False),
        ([0], False, False),
        ([], False, False),
    ],
)
def test_names_that_an_accelerator_may_stand_for(
    specs: list[object], is_first: bool, are_several: bool
) -> None:
    assert is_first_cpu_device(specs) is is_first
    assert are_cpu_devices(specs) is are_several


_PROGRAM = """
import jax
from tests.platforms import selected_platform, set_up_devices
import stratagem as sg

set_up_devices(selected_platform(), 4)
one, two = sg.OneDeviceStrategy("cpu:0"), sg.MirroredStrategy(["cpu:0", "cpu:1"])
central = sg.CentralStorageStrategy(["cpu:0"], "cpu:0")
print([device.id for device in (*one.topology.devices, *two.topology.devices)])
print(one.run(lambda: jax.numpy.ones(2) * 2).devices())
print(central.topology.devices[0].id, central.extended.parameter_devices[0])
print(sg.MirroredStrategy().topology.devices[0].id, len(jax.devices("cpu")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "ids"),
    [("imitated", "[4, 0, 1]"), ("imitated_alone", "[4, 4]")],
)
def test_strategy_of_one_named_device_computes_on_the_accelerator(platform: str, ids: str) -> None:
    lines = run_fresh(_PROGRAM, STRATAGEM_TEST_PLATFORM=platform, JAX_PLATFORMS="cpu")
    assert lines[0] == ids
    assert lines[1].startswith("{CpuDevice(id=4)")
    assert lines[2].startswith("4 ")
    assert lines[2].endswith("0")
    assert lines[3] == "4 4"
