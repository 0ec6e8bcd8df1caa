"""The device of the sides on JAX, its memory, and the seconds that compilation takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["count_compile_s", "find_device", "peak_bytes"]

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def find_device(platform: str) -> Any:
    """Returns the first device of a platform."""
    return jax.devices(platform)[0]


def peak_bytes(device: Any) -> int | None:
    """Returns the largest memory in use so far; None on devices that do not count it."""
    statistics = device.memory_stats() or {}
    return statistics.get("peak_bytes_in_use")


def count_compile_s() -> Callable[[], float]:
    """Returns what returns the seconds of compilation, of loading from a cache too, since now."""
    durations: list[float] = []

    def note(event: str, duration_s: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            durations.append(duration_s)

    jax.monitoring.register_event_duration_secs_listener(note)
    return lambda: sum(durations)
