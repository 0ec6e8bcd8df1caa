"""Devices assigned to each task."""

from __future__ import annotations

import os

import pytest

from stratagem.environment import num_forced_cpu_devices, size_cpu_thread_pool
from stratagem.launch.plan.task_plan import assign_devices, uses_gpus

ON_CPU = ""
WORKERS = ["worker"] * 2
ALL = ["chief", "worker", "ps", "ps", "evaluator"]


def gpus_of(task_types, *, each=None, gpus="", base=None) -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES becomes, task by task; None where it is left alone."""
    names = gpus.split(",") if gpus else []
    dealt = assign_devices(task_types, devices_per_worker=each, gpus=names, base=base or {})
    for variables in dealt:
        # A task without a GPU is not to look for one, and every other may.
        assert ("JAX_PLATFORMS" in variables) == (variables.get("CUDA_VISIBLE_DEVICES") == ON_CPU)
    return [variables.get("CUDA_VISIBLE_DEVICES") for variables in dealt]


@pytest.mark.parametrize(
    ("task_types", "each", "gpus", "seen"),
    [
        (WORKERS, None, "0,1,2,3", ["0,1", "2,3"]),
        (WORKERS, None, "0,1,2", ["0", "1"]),
        (WORKERS, 1, "4,5,6", ["4", "5"]),
        (["worker"], None, "GPU-1f,GPU-2e", ["GPU-1f,GPU-2e"]),
        # Fewer GPUs than workers, and nothing asked for: all stays as it is.
        (WORKERS, None, "0", [None, None]),
        (WORKERS, None, "", [None, None]),
        (ALL, None, "0,1,2,3", ["0,1", "2,3", ON_CPU, ON_CPU, ON_CPU]),
        (ALL, None, "0,1,2,3,4", ["0,1", "2,3", ON_CPU, ON_CPU, "4"]),
        (ALL, 1, "0,1,2,3,4", ["0", "1", ON_CPU, ON_CPU, "2"]),
        (["chief", "ps", "evaluator"], 2, "7,8,9", ["7,8", ON_CPU, "9"]),
    ],
)
def test_gpus_are_dealt_out_in_order(task_types, each, gpus, seen) -> None:
    assert gpus_of(task_types, each=each, gpus=gpus) == seen


def test_too_few_gpus_are_counted_in_the_message() -> None:
    with pytest.raises(
        ValueError, match=r"2 workers with devices_per_worker=2 need 4 GPUs, but there are 3: 0,1,2"
    ):
        gpus_of([*WORKERS, "ps"], each=2, gpus="0,1,2")


@pytest.mark.parametrize(
    ("platforms", "expected"),
    [
        (None, True),
        ("", True),
        ("cuda", True),
        ("tpu,CUDA", True),
        ("gpu", True),
        ("cpu", False),
        ("tpu,cpu", False),
    ],
)
def test_gpus_are_used_where_jax_would_use_them(platforms, expected) -> None:
    base = {} if platforms is None else {"JAX_PLATFORMS": platforms}
    assert uses_gpus(base) is expected
    dealt = assign_devices(["worker"], devices_per_worker=2, gpus=["0", "1"], base=base)
    assert ("CUDA_VISIBLE_DEVICES" in dealt[0]) is expected
    assert ("XLA_FLAGS" in dealt[0]) is not expected


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (None, ""),
        ("--xla_dump_to=here --xla_a=1", "--xla_dump_to=here --xla_a=1 "),
        ("--xla_force_host_platform_device_count=8 --xla_b", "--xla_b "),
    ],
)
def test_virtual_cpu_devices_are_those_that_the_library_counts(monkeypatch, flags, kept) -> None:
    base = {} if flags is None else {"XLA_FLAGS": flags, "JAX_NUM_CPU_DEVICES": "8"}
    worker, ps, evaluator = assign_devices(
        ["worker", "ps", "evaluator"], devices_per_worker=3, gpus=[], base=base
    )
    assert worker == evaluator
    assert ps == {}
    assert worker["XLA_FLAGS"] == f"{kept}--xla_force_host_platform_device_count=3"
    assert worker["JAX_NUM_CPU_DEVICES"] == "3"
    monkeypatch.setenv("XLA_FLAGS", worker["XLA_FLAGS"])
    assert num_forced_cpu_devices() == 3


@pytest.mark.parametrize(("num_devices", "chosen"), [(3, None), (3, "64"), (1, None)])
def test_thread_pool_is_sized_as_the_library_does(monkeypatch, num_devices, chosen) -> None:
    monkeypatch.setenv("NPROC", chosen or "")
    base = {"NPROC": chosen} if chosen else {}
    (worker,) = assign_devices(["worker"], devices_per_worker=num_devices, gpus=[], base=base)
    if chosen is None:
        monkeypatch.delenv("NPROC")
        size_cpu_thread_pool(num_devices)
    dealt = {**base, **worker}.get("NPROC")
    # One device needs no more threads than there are.
    assert dealt == (os.environ["NPROC"] if num_devices > 1 else None)
