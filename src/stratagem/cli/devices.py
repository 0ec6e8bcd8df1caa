"""`stratagem devices`: tables of the local devices, and of the replicas of each strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import jax
from rich.console import Console
from rich.table import Table

from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.one_device import OneDeviceStrategy
from stratagem.topology import local_devices

__all__ = ["device_names", "memory_text", "show"]

_BYTES_PER_GIB = 2**30


def show() -> None:
    """Prints both tables; starts JAX's backend."""
    console = Console()
    devices = local_devices()
    names = device_names(devices)
    console.print(
        f"JAX {jax.__version__} on {jax.default_backend()}, "
        f"process {jax.process_index()} of {jax.process_count()}"
    )
    console.print(_device_table(devices, names))
    console.print(_strategy_table(devices, names))
    if len(devices) == 1:
        console.print('More replicas on one CPU: MirroredStrategy(["cpu:0", "cpu:1"])', style="dim")


def device_names(devices: Iterable[jax.Device]) -> list[str]:
    """Returns names such as "gpu:0" for local devices, as strategies accept them.

    The devices of each platform must be in JAX's order, from its first one on.
    """
    seen: Counter[str] = Counter()
    names: list[str] = []
    for device in devices:
        names.append(f"{device.platform}:{seen[device.platform]}")
        seen[device.platform] += 1
    return names


def memory_text(device: jax.Device) -> str:
    """Formats the memory that JAX may use on a device, or "-" if unknown, as on CPU."""
    limit_bytes = (device.memory_stats() or {}).get("bytes_limit")
    return "-" if limit_bytes is None else f"{limit_bytes / _BYTES_PER_GIB:.1f} GiB"


def _device_table(devices: Sequence[jax.Device], names: Sequence[str]) -> Table:
    table = Table("device", "kind", "memory", title="Local devices", title_justify="left")
    for name, device in zip(names, devices, strict=True):
        table.add_row(name, device.device_kind, memory_text(device))
    return table


def _strategy_table(devices: Sequence[jax.Device], names: Sequence[str]) -> Table:
    names_of = dict(zip(devices, names, strict=True))
    table = Table("strategy", "replicas", "devices", title="Strategies", title_justify="left")
    table.add_row("none (default)", "1", f"{names[0]}, or JAX's default device")
    for call, strategy in (
        (f'OneDeviceStrategy("{names[0]}")', OneDeviceStrategy(devices[0])),
        ("MirroredStrategy()", MirroredStrategy()),
    ):
        used = ", ".join(names_of[device] for device in strategy.extended.worker_devices)
        table.add_row(call, str(strategy.num_replicas_in_sync), used)
    return table
