"""Startup of JAX in processes that know each other's devices, and never talk to each other in JAX.

Arrays over the devices of all processes describe values of which each process has its own part. No
program of JAX combines the parts, so that no process depends on another one.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import importlib.util
import pkgutil
import socket
from collections.abc import Sequence
from typing import Any

import jax

from stratagem.cluster.accelerators import local_gpus
from stratagem.devices.devices import local_devices
from stratagem.devices.private import SeparateNodes
from stratagem.messages import explain


@functools.cache
def start_separately(num_processes: int, process_id: int) -> tuple[jax.Device, ...]:
    """Starts JAX, and returns a device of each process, in their order.

    The devices of other processes are names: only this process's own computes. Raises RuntimeError
    if this process has several devices, or another platform than CPU.
    """
    settings: Any = jax.config
    check_platform(settings.jax_platforms)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    nodes = SeparateNodes(port, num_processes, process_id)
    with concurrent.futures.ThreadPoolExecutor(num_processes) as pool:
        others = [pool.submit(nodes.start_other, one) for one in nodes.others]
        own = local_devices()
        for other in others:
            other.result()
    atexit.register(nodes.close)
    check_device(own)
    return tuple(sorted(jax.devices(), key=lambda device: device.process_index))


def check_platform(platforms: str | None) -> None:
    """Raises RuntimeError if JAX would start on GPUs, where it waits for those of other processes.

    `platforms` is the value of JAX_PLATFORMS, if any.
    """
    if platforms:
        first = platforms.split(",")[0]
        found = "" if first == "cpu" else f"JAX_PLATFORMS is {platforms!r}"
    else:
        gpus = local_gpus() if _has_gpu_plugin() else ()
        found = f"JAX would start on this host's GPUs: {', '.join(gpus)}" if gpus else ""
    if found:
        raise RuntimeError(
            explain(
                f"{found}.",
                expected="CPU devices: processes of an ElasticStrategy do not compute on others.",
                fix="set JAX_PLATFORMS=cpu, or use MultiWorkerMirroredStrategy.",
            )
        )


def _has_gpu_plugin() -> bool:
    plugins = importlib.util.find_spec("jax_plugins")
    folders = None if plugins is None else plugins.submodule_search_locations
    names = [module.name for module in pkgutil.iter_modules(folders or ())]
    return any(name.startswith(("xla_cuda", "xla_rocm")) for name in names)


def check_device(own: Sequence[Any]) -> None:
    """Raises RuntimeError unless a process has one CPU device."""
    if len(own) > 1 or own[0].platform != "cpu":
        raise RuntimeError(
            explain(
                f"This process has {len(own)} devices: {', '.join(map(str, own))}.",
                expected="one CPU device for each process of an ElasticStrategy.",
                fix="start one process for each device, with JAX_PLATFORMS=cpu; "
                "MultiWorkerMirroredStrategy supports other platforms and several devices.",
            )
        )
