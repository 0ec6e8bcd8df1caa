"""Which devices each task sees: variables that JAX reads when it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from stratagem.messages import explain

__all__ = ["TRAINERS", "deal_devices", "uses_gpus"]

TRAINERS = ("chief", "worker")

_DEVICE_COUNT = re.compile(r"\s*--xla_force_host_platform_device_count=\S*")
_GPU_PLATFORMS = {"cuda", "gpu", "rocm"}
# So that a task without a GPU neither takes another's memory nor complains that it has none.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
# XLA:CPU's threads a virtual device, as in environment.size_cpu_thread_pool.
_THREADS_PER_DEVICE = 4


def uses_gpus(base: Mapping[str, str]) -> bool:
    """Returns whether JAX would use a GPU that it sees.

    Args:
        base: the variables that all tasks inherit.

    Returns:
        False where `JAX_PLATFORMS` names other platforms only.
    """
    platforms = base.get("JAX_PLATFORMS", "")
    return not platforms or bool(_GPU_PLATFORMS & set(platforms.lower().split(",")))


def deal_devices(
    task_types: Sequence[str],
    *,
    devices_per_worker: int | None,
    gpus: Sequence[str],
    base: Mapping[str, str],
) -> list[dict[str, str]]:
    """Deals the GPUs out, or makes virtual CPU devices where there are none.

    Servers get no device. The evaluator takes GPUs that the workers leave over, as many as a
    worker has at most; without one it runs on the CPU.

    Args:
        task_types: the type of every task.
        devices_per_worker: how many each worker gets; None shares the GPUs evenly, and with fewer
            GPUs than workers leaves everything as it is.
        gpus: the GPUs that there are, as `CUDA_VISIBLE_DEVICES` names them.
        base: the variables that all tasks inherit.

    Returns:
        The variables to set, task by task.

    Raises:
        ValueError: fewer GPUs than asked for.

    Example:
        >>> deal_devices(["worker", "ps"], devices_per_worker=None, gpus=["0", "1"], base={})
        [{'CUDA_VISIBLE_DEVICES': '0,1'}, {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}]
    """
    if not gpus or not uses_gpus(base):
        cpu = {} if devices_per_worker is None else _cpu_devices(devices_per_worker, base)
        return [{} if task_type == "ps" else dict(cpu) for task_type in task_types]
    num_trainers = sum(task_type in TRAINERS for task_type in task_types)
    share = len(gpus) // num_trainers if devices_per_worker is None else devices_per_worker
    if share == 0:
        return [{} for _ in task_types]
    if share * num_trainers > len(gpus):
        raise ValueError(
            explain(
                f"{num_trainers} workers with devices_per_worker={share} need "
                f"{share * num_trainers} GPUs, and there are {len(gpus)}: {','.join(gpus)}.",
                expected="as many GPUs as the workers are to have.",
                fix="lower one of the two numbers, or set JAX_PLATFORMS=cpu for virtual devices.",
            )
        )
    return _deal(task_types, gpus, share)


def _deal(task_types: Sequence[str], gpus: Sequence[str], share: int) -> list[dict[str, str]]:
    left = list(gpus)
    dealt: list[dict[str, str]] = []
    # Workers come before the evaluator in every list of tasks, so that they are served first.
    for task_type in task_types:
        hand = [] if task_type == "ps" else left[:share]
        left = left[len(hand) :]
        dealt.append({"CUDA_VISIBLE_DEVICES": ",".join(hand)} if hand else dict(_NO_GPU))
    return dealt


def _cpu_devices(num_devices: int, base: Mapping[str, str]) -> dict[str, str]:
    """Both spellings of the number, because either may be in the environment already."""
    kept = _DEVICE_COUNT.sub("", base.get("XLA_FLAGS", ""))
    variables = {
        "XLA_FLAGS": f"{kept} --xla_force_host_platform_device_count={num_devices}".strip(),
        "JAX_NUM_CPU_DEVICES": str(num_devices),
    }
    if num_devices > 1 and "NPROC" not in base:
        variables["NPROC"] = str(_THREADS_PER_DEVICE * num_devices)
    return variables
