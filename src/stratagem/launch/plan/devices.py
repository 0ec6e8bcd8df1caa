"""Assignment of GPUs or virtual CPU devices to tasks, as environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from stratagem.messages import explain

TRAINERS = ("chief", "worker")
SERVERS = ("ps", "input")  # They run until the trainers have ended.

_DEVICE_COUNT = re.compile(r"\s*--xla_force_host_platform_device_count=\S*")
_GPU_PLATFORMS = {"cuda", "gpu", "rocm"}
# Keeps a task without a GPU from using the memory of others, and from warning about it.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
# XLA:CPU threads per virtual device, as in environment.size_cpu_thread_pool.
_THREADS_PER_DEVICE = 4


def uses_gpus(base: Mapping[str, str]) -> bool:
    """Returns False if `JAX_PLATFORMS` names only platforms other than GPUs."""
    platforms = base.get("JAX_PLATFORMS", "")
    return not platforms or bool(_GPU_PLATFORMS & set(platforms.lower().split(",")))


def assign_devices(
    task_types: Sequence[str],
    *,
    devices_per_worker: int | None,
    gpus: Sequence[str],
    base: Mapping[str, str],
) -> list[dict[str, str]]:
    """Returns the variables of each task that assign it GPUs, or virtual CPU devices without GPUs.

    Servers get no device. The evaluator gets the GPUs that the workers leave, at most as many as a
    worker; with none left it runs on the CPU. None for `devices_per_worker` divides the GPUs
    evenly, or changes nothing if there are fewer GPUs than workers. `gpus` are named as in
    `CUDA_VISIBLE_DEVICES`; all tasks inherit the environment `base`. Raises ValueError if there are
    fewer GPUs than requested.

    Example:
        >>> assign_devices(["worker", "ps"], devices_per_worker=None, gpus=["0", "1"], base={})
        [{'CUDA_VISIBLE_DEVICES': '0,1'}, {'CUDA_VISIBLE_DEVICES': '', 'JAX_PLATFORMS': 'cpu'}]
    """
    if not gpus or not uses_gpus(base):
        cpu = {} if devices_per_worker is None else _cpu_devices(devices_per_worker, base)
        return [{} if task_type in SERVERS else dict(cpu) for task_type in task_types]
    num_trainers = sum(task_type in TRAINERS for task_type in task_types)
    share = len(gpus) // num_trainers if devices_per_worker is None else devices_per_worker
    if share == 0:
        return [{} for _ in task_types]
    if share * num_trainers > len(gpus):
        raise ValueError(
            explain(
                f"{num_trainers} workers with devices_per_worker={share} need "
                f"{share * num_trainers} GPUs, but there are {len(gpus)}: {','.join(gpus)}.",
                expected="enough GPUs for all workers.",
                fix="lower workers or devices_per_worker, or set JAX_PLATFORMS=cpu to use virtual "
                "devices.",
            )
        )
    return _assign_gpus(task_types, gpus, share)


def _assign_gpus(
    task_types: Sequence[str], gpus: Sequence[str], share: int
) -> list[dict[str, str]]:
    free = list(gpus)
    assigned: list[dict[str, str]] = []
    # Workers precede the evaluator in every list of tasks, so they are served first.
    for task_type in task_types:
        own = [] if task_type in SERVERS else free[:share]
        free = free[len(own) :]
        assigned.append({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else dict(NO_GPU))
    return assigned


def _cpu_devices(num_devices: int, base: Mapping[str, str]) -> dict[str, str]:
    """Sets the number in both spellings, because either may already be in the environment."""
    flags = _DEVICE_COUNT.sub("", base.get("XLA_FLAGS", ""))
    variables = {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={num_devices}".strip(),
        "JAX_NUM_CPU_DEVICES": str(num_devices),
    }
    if num_devices > 1 and "NPROC" not in base:
        variables["NPROC"] = str(_THREADS_PER_DEVICE * num_devices)
    return variables
