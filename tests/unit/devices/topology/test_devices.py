"""Devices by name, by index and as objects; virtual CPU devices; rejected specs."""

from __future__ import annotations

import re

import jax
import pytest

from stratagem.devices.finding import find_devices, local_devices
from tests.fresh_process import run_fresh


@pytest.mark.parametrize(
    ("spec", "device_id"),
    [
        ("cpu:1", 1),
        ("CPU:1", 1),
        ("/cpu:1", 1),
        ("device:CPU:1", 1),
        ("/device:CPU:1", 1),
        ("/job:localhost/device:CPU:1", 1),
        ("/job:localhost/replica:0/task:0/device:CPU:1", 1),
        ("cpu", 0),
        (7, 7),
    ],
)
def test_one_device_is_found(spec, device_id) -> None:
    (device,) = find_devices([spec])
    assert (device.platform, device.id) == ("cpu", device_id)


def test_devices_keep_their_order_whatever_they_are_given_as() -> None:
    devices = find_devices([jax.devices()[3], "cpu:0", 2, "/device:CPU:6"])
    assert [device.id for device in devices] == [3, 0, 2, 6]


def test_local_devices_are_all_cpus_where_there_is_no_accelerator() -> None:
    assert [device.id for device in local_devices()] == list(range(8))


def test_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"devices=\[\] is empty"):
        find_devices([])


@pytest.mark.parametrize(
    "specs", [["cpu:1", "cpu:1"], ["cpu:1", "/device:CPU:1"], ["cpu:0", "cpu:1", 1]]
)
def test_repeated_device_is_refused_and_named(specs) -> None:
    with pytest.raises(ValueError, match=r"cpu:1 more than once(?s:.)*remove the duplicates"):
        find_devices(specs)


@pytest.mark.parametrize("spec", ["gpu:0", "tpu:3", "cuda:0", 8, -1])
def test_device_that_does_not_exist_is_refused_with_a_list_of_those_that_do(spec) -> None:
    names = ", ".join(f"cpu:{index}" for index in range(8))
    with pytest.raises(ValueError, match=f"does not exist(?s:.)*one of {names}"):
        find_devices([spec])


def test_cpu_that_can_no_more_be_made_is_refused_with_the_way_to_make_it() -> None:
    way = re.escape('jax.config.update("jax_num_cpu_devices", 9)')
    with pytest.raises(ValueError, match=f"cpu:8 does not exist(?s:.)*JAX has started(?s:.)*{way}"):
        find_devices(["cpu:8"])


@pytest.mark.parametrize("name", ["", "cpu:", "cpu:x", "cpu:-1", "cpu:1\n", "cpu 1", "xpu:0", "0"])
def test_string_that_is_not_a_device_name_is_refused(name) -> None:
    with pytest.raises(
        ValueError, match=r"is not a device name(?s:.)*a platform \(cpu, gpu, tpu\)"
    ):
        find_devices(["cpu:0", name])


@pytest.mark.parametrize(
    ("spec", "kind"), [(None, "NoneType"), (1.0, "float"), (True, "bool"), (["cpu:0"], "list")]
)
def test_spec_of_another_type_is_refused(spec, kind) -> None:
    with pytest.raises(TypeError, match=f"is of type {kind}(?s:.)*an index, or a jax.Device"):
        find_devices([spec])


@pytest.mark.parametrize(
    "name", ["/job:worker/device:CPU:0", "/job:localhost/task:1/cpu:0", "/replica:1/cpu:0"]
)
def test_name_of_a_device_of_another_task_is_refused(name) -> None:
    with pytest.raises(ValueError, match=f"{name}, which belongs to another process"):
        find_devices([name])


def test_device_of_another_process_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match=r"contains .*cpu:0.* belongs to another process"):
        find_devices([jax.devices()[0]])


REPORT = """
import os, jax
from stratagem.devices.finding import find_devices
def report(specs):
    try:
        print([device.id for device in find_devices(specs)])
    except ValueError as error:
        print(str(error).replace("\\n", " "))
"""
STATE = "print(len(jax.devices('cpu')), os.environ.get('NPROC'))"


def test_virtual_cpu_devices_are_made_with_threads_for_them() -> None:
    program = f"{REPORT}report(['cpu:0', 'cpu:2'])\n{STATE}"
    assert run_fresh(program, NPROC=None, XLA_FLAGS=None) == ["[0, 2]", "3 12"]


def test_misspelt_name_does_not_start_jax_so_that_the_right_one_still_works() -> None:
    program = f"{REPORT}report(['cpu:0', 'cpuu:1'])\nreport(['cpu:0', 'cpu:1'])"
    refused, found = run_fresh(program, XLA_FLAGS=None)
    assert "'cpuu:1' is not a device name" in refused
    assert found == "[0, 1]"


def test_virtual_cpu_devices_cannot_be_made_after_jax_has_started() -> None:
    program = f"{REPORT}jax.devices()\nreport(['cpu:0', 'cpu:1'])\n{STATE}"
    refused, state = run_fresh(program, NPROC=None, XLA_FLAGS=None)
    assert "device cpu:1 does not exist." in refused
    assert 'jax.config.update("jax_num_cpu_devices", 2)' in refused
    assert state == "1 None"


@pytest.mark.slow
@pytest.mark.parametrize(("highest", "num_devices"), [(1, 4), (5, 6)])
def test_virtual_cpu_devices_that_xla_flags_ask_for_are_never_made_fewer(
    highest, num_devices
) -> None:
    program = f"{REPORT}report(['cpu:{highest}'])\n{STATE}"
    flags = "--xla_force_host_platform_device_count=4"
    lines = run_fresh(program, XLA_FLAGS=flags, NPROC="3")
    assert lines == [f"[{highest}]", f"{num_devices} 3"]


def test_virtual_cpu_devices_that_the_program_asked_for_are_never_made_fewer() -> None:
    program = f"{REPORT}jax.config.update('jax_num_cpu_devices', 4)\nreport(['cpu:1'])\n{STATE}"
    assert run_fresh(program, NPROC=None, XLA_FLAGS=None) == ["[1]", "4 16"]
