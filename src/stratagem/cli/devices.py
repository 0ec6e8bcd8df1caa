"""`stratagem devices`: tables of the local devices, and of the replicas of each strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from stratagem.cli.commands import print_json
from stratagem.devices.finding import local_devices

_BYTES_PER_GIB = 2**30


def show(*, as_json: bool = False) -> None:
    """Prints both tables, or their values as JSON; starts JAX's backend."""
    devices = local_devices()
    names = device_names(devices)
    if as_json:
        print_json(_values(devices, names))
        return
    console = Console()
    console.print(
        f"JAX {jax.__version__} on {jax.default_backend()}, "
        f"process {jax.process_index()} of {jax.process_count()}"
    )
    table = Table("device", "kind", "memory", title="Local devices", title_justify="left")
    for name, device in zip(names, devices, strict=True):
        table.add_row(name, device.device_kind, memory_text(device))
    console.print(table)
    table = Table("strategy", "replicas", "devices", title="Strategies", title_justify="left")
    table.add_row("none (default)", "1", f"{names[0]}, or JAX's default device")
    for call, used in _devices_by_strategy(names).items():
        table.add_row(call, str(len(used)), ", ".join(used))
    console.print(table)
    if len(devices) == 1:
        console.print('More replicas on one CPU: MirroredStrategy(["cpu:0", "cpu:1"])', style="dim")


def device_names(devices: Iterable[jax.Device]) -> list[str]:
    """Returns names such as "gpu:0" for local devices, as strategies accept them.

    The devices of each platform must be in JAX's order, from its first one on.
    """
    platforms = [device.platform for device in devices]
    return [f"{one}:{platforms[:place].count(one)}" for place, one in enumerate(platforms)]


def memory_text(device: jax.Device) -> str:
    """Formats the memory that JAX may use on a device, or "-" if unknown, as on CPU."""
    limit_bytes = _memory_bytes(device)
    return "-" if limit_bytes is None else f"{limit_bytes / _BYTES_PER_GIB:.1f} GiB"


def _memory_bytes(device: jax.Device) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")


def _values(devices: Sequence[jax.Device], names: Sequence[str]) -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "process_index": jax.process_index(),
        "num_processes": jax.process_count(),
        "devices": [
            {"name": name, "kind": device.device_kind, "memory_bytes": _memory_bytes(device)}
            for name, device in zip(names, devices, strict=True)
        ],
        "strategies": [
            {"strategy": call, "num_replicas": len(used), "devices": used}
            for call, used in _devices_by_strategy(names).items()
        ],
    }


def _devices_by_strategy(names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the names of each strategy's devices; to make strategies would load Keras."""
    return {
        f'OneDeviceStrategy("{names[0]}")': [names[0]],
        "MirroredStrategy()": list(names),
    }
